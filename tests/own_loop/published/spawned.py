"""Workers of torch.multiprocessing.spawn, one a rank, with DistributedDataParallel."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "12355")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def demo_basic(rank, world_size):
    setup(rank, world_size)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    if rank == 0:
        print("parameters:", sum(p.numel() for p in net.parameters()), flush=True)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(20, 32)), torch.randn(20, 8))
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 2
    mp.spawn(demo_basic, args=(world_size,), nprocs=world_size, join=True)
