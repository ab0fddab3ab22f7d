"""Finds the blocks that a model checkpoints by itself, in one forward, without patches of torch and without reruns.

A block runs again for backward if torch.utils.checkpoint enters it. The forward of a custom autograd Function may enter
it instead (helpers of guided-diffusion, fairscale and Megatron). The interpreter's stack shows this: a frame of either
lies between the block and the block around it.

    Model.forward ─ checkpoint() ─ Layer.__call__            Layer
    ResBlock.forward ─ CheckpointFunction.apply ─ conv, norm  all that ResBlock calls, so ResBlock
"""

from __future__ import annotations

import inspect
import sys
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.utils.checkpoint
from torch import nn

_DOORS = {
    (inspect.getfile(inspect.unwrap(torch.utils.checkpoint.checkpoint)), "checkpoint"),
    (inspect.getfile(torch.autograd.Function), "apply"),
}


class OwnCheckpoints:
    """Hooks between enter and exit; `blocks` are the outermost blocks that will run again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[tuple[str, int, list[bool]]] = []
        """Each running block: fqn, checkpoint frames on the stack, and whether each inner call went through one."""
        self._found: dict[str, None] = {}
        self._open = ExitStack()

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(fqn for fqn in self._found if not any(fqn.startswith(f"{one}.") for one in self._found))

    def __enter__(self) -> Self:
        for fqn, module in self._model.named_modules():
            self._open.callback(module.register_forward_pre_hook(self._enters(fqn), prepend=True).remove)
            self._open.callback(module.register_forward_hook(self._leaves, always_call=True).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def _enters(self, fqn: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            n_doors = _n_doors(sys._getframe())
            if self._stack:
                through = n_doors > self._stack[-1][1]
                self._stack[-1][2].append(through)
                if through:
                    self._found[fqn] = None
            self._stack.append((fqn, n_doors, []))

        return hook

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        fqn, _, through = self._stack.pop()
        if fqn and through and all(through):
            self._found[fqn] = None


def _n_doors(frame: FrameType | None) -> int:
    n_doors = 0
    while frame is not None:
        n_doors += (frame.f_code.co_filename, frame.f_code.co_name) in _DOORS
        frame = frame.f_back
    return n_doors
