"""Switches off the checkpointing inside a model: by the flags of known libraries, and inside torch as a plain call.

transformers  gradient_checkpointing      timm  grad_checkpointing      guided-diffusion  use_checkpoint
mmcv  with_cp      torchvision's DenseNet  memory_efficient
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as torchs
from torch import nn

SWITCHES = (
    "gradient_checkpointing", "grad_checkpointing", "use_checkpoint", "use_checkpointing", "use_grad_checkpointing",
    "use_gradient_checkpointing", "activation_checkpointing", "checkpointing", "with_cp", "memory_efficient",
)  # fmt: skip
"""Attributes that are True on a module that checkpoints itself."""


@contextmanager
def checkpointing_off(model: nn.Module) -> Iterator[None]:
    """Turns every known switch of `model` off, and makes torch.utils.checkpoint a plain call of its function."""
    on = [(module, name) for module in model.modules() for name in SWITCHES if getattr(module, name, None) is True]
    torchs_own = (torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator)
    for module, name in on:
        setattr(module, name, False)
    torchs.CheckpointFunction = _Call  # type: ignore[misc, assignment]
    torchs._checkpoint_without_reentrant_generator = _nothing_kept  # type: ignore[assignment]
    try:
        yield
    finally:
        torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator = torchs_own  # type: ignore[misc]
        for module, name in on:
            setattr(module, name, True)


class _Call:
    """Reentrant checkpointing as a plain call."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _nothing_kept(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Non-reentrant checkpointing as a plain call: the generator around the call does nothing."""
    yield
