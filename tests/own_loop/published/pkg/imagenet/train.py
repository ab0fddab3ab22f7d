"""`python -m imagenet.train`: arguments under `if __name__`, relative imports."""

import argparse

import torch
from torch import nn

from .models import Mixer


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def main():
    args = parse_args()
    model = Mixer(depth=args.depth)
    print(f"parameters: {sum(p.numel() for p in model.parameters())}")
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        images, labels = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
