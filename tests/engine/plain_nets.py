"""Blocks that hold plain values only. `made` writes another last method, by which a block might remember its calls."""

from __future__ import annotations

import contextvars
import functools
import itertools
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PACKAGE: Any = types.ModuleType("plain_nets_package")
PACKAGE.tick = lambda: 1
FILE = {"torch": torch, "F": F, "os": os, "sys": sys, "PACKAGE": PACKAGE, "LOG": [], "N": 0, "TICKS": itertools.count(),
        "CONTEXT": contextvars.ContextVar("calls", default=0), "cache": functools.lru_cache, "Path": Path}  # fmt: skip


class Pure(nn.Module):
    def __init__(self, width: int = 4, share: float = 0.1) -> None:
        super().__init__()
        self.fc, self.drop, self.norm = nn.Linear(width, width), nn.Dropout(share), nn.LayerNorm(width)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
        x = x + self.drop(self.fc(self.norm(x)).masked_fill(~mask, -torch.inf) / math.sqrt(self.width))
        parts = [part.float() for part in x.split(1)]  # type: ignore[no-untyped-call]
        return self.after(F.gelu(torch.cat(parts))).to(x.dtype)

    def after(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor


def made(body: str) -> nn.Module:
    """A block with the members `body`, which stand in a file of their own."""
    file = {**FILE, "Pure": Pure, "__name__": "plain_nets_file"}
    source = "class Block(Pure):\n    " + body.replace(" / ", "\n    ") + "\n"
    exec(compile(source, "plain_nets_file.py", "exec"), file)
    kind: Any = file["Block"]
    return kind()  # type: ignore[no-any-return]


REMEMBER = [
    "def after(self, x): global N; N += 1; return x",
    "def after(self, x): LOG.append(1); return x",
    "def after(self, x): return x * next(TICKS)",
    "def after(self, x): return x * PACKAGE.tick()",
    "def after(self, x): CONTEXT.set(CONTEXT.get() + 1); return x",
    "def after(self, x): os.environ['N'] = '1'; return x",
    "def after(self, x): self.width += 1; return x",
    "def after(self, x): self.fc.weight.calls = 1; return x",
    "def after(self, x): self.__dict__.update(width=5); return x",
    "def after(self, x): self.register_buffer('late', x); return x",
    "def after(self, x): setattr(self, 'width', 5); return x",
    "def after(self, x, seen=[]): seen.append(1); return x",
    "calls = [0] / def after(self, x): self.calls[0] += 1; return x",
    "after = property(lambda self: LOG.append)",
    "after = staticmethod(lambda x: x)",
    "after = cache(lambda self, x: x)",
    "def after(self, x): import plain_nets_package; return x * plain_nets_package.N",
    "def after(self, x): torch.save(x, '/dev/null'); return x",
    "def after(self, x): return x * len(open('/dev/null').read())",
    "def after(self, x): return x * len(Path('/dev/null').read_text())",
    "def after(self, x): return torch.ops.aten.relu(x)",
    "def after(self, x): return [sys._getframe() for _ in x] and x",
    "def __call__(self, x): LOG.append(1); return self.forward(x)",
]


def net(after: str = "", n: int = 3) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(made(after) if after else Pure() for _ in range(n))), torch.randn(8, 4)
