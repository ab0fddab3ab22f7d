"""A policy below DistributedDataParallel and FSDP2, on two real ranks: gradients of an unpoliced model, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from explorer.child_process.forks import at_hand
from explorer.engine.policy.apply import apply_policy
from explorer.record.policy import Policy

ALL = Policy.recompute(["0", "1", "2"])
SEGMENT = Policy.recompute([("0", "1", "2")])
HOW = ("ddp", "fsdp of policed", "policed fsdp")
Tensors = dict[str, Tensor]


@pytest.mark.slow
def test_two_ranks_keep_their_gradients_under_a_policy(tmp_path: Path) -> None:
    # A rank that gloo aborts is started once more; wrong gradients are wrong again.
    for attempt in (tmp_path / "first", tmp_path / "second"):
        attempt.mkdir()
        codes = codes_of_ranks(attempt)
        if codes == [0, 0]:
            break
    assert codes == [0, 0]
    for rank in range(2):
        assert (attempt / str(rank)).read_text().splitlines() == [f"{how}: the same 19 tensors" for how in HOW]


def codes_of_ranks(folder: Path) -> list[int | None]:
    ranks = [at_hand().start(ranked, rank, str(folder), needs=["torch._dynamo"]) for rank in range(2)]
    try:
        for process in ranks:
            process.wait()
        return [process.code for process in ranks]
    finally:
        for process in ranks:
            process.close()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)),
        nn.Linear(16, 1, bias=False),
    )


class InTurn(nn.ModuleList):
    """The same blocks, called one after the other by a forward of their own."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


def step(how: str, policy: Policy) -> Tensors:
    """Whole gradients and running statistics of this rank's second step."""
    model: nn.Module = InTurn(net())
    called = model
    if how != "policed fsdp":
        apply_policy(model, policy)
    if how == "ddp":
        called = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if how == "policed fsdp":
        apply_policy(model, policy)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3 + dist.get_rank())
        called(torch.randn(4, 16)).square().mean().backward()
    tensors = {name: _whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return tensors | {name: b.clone() for name, b in model.named_buffers() if "num_batches" not in name}


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def ranked(rank: int, folder: str) -> None:
    """One rank's process; writes what it found equal."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with (Path(folder) / str(rank)).open("w") as told:
        for how in HOW:
            expected = step(how, Policy())
            for tensors in (step(how, ALL), step(how, SEGMENT)):
                wrong = [name for name in expected if not torch.equal(expected[name], tensors[name])]
                assert expected.keys() == tensors.keys() and not wrong, wrong
            print(f"{how}: the same {len(tensors)} tensors", file=told)
    dist.barrier()
    dist.destroy_process_group()
