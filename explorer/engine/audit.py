"""What a module remembers besides its weights: buffers and plain attributes, read before and after backward.

A forward that runs again moves such state once more: a counter counts twice, a cache grows, a running mean drifts. No
gradient shows it. `StateAudit` reads the state at the borders of the phases and never touches the model.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from explorer.engine.diffs import same_bits
from explorer.record.comparison import StateChange
from explorer.record.measurement import Phase

StateKey = tuple[str, str, Literal["buffer", "attribute"]]
State = dict[StateKey, Any]

_OWN = frozenset(vars(nn.Module())) | {"forward"}
"""What torch keeps in a module's __dict__, and the forward that a policy puts there."""
_MAX_DEPTH = 4
_MAX_ITEMS = 64
_MAX_TEXT = 40


@dataclass
class StateAudit:
    """Collects what backward changed in `model`: give `on_phase` to the step, then read `changes`."""

    model: nn.Module
    changes: dict[StateKey, StateChange] = field(default_factory=dict)
    _after_forward: State | None = None

    def on_phase(self, phase: Phase | str) -> None:
        """Called at the start of each phase; a backward that ends is compared with where it started."""
        if phase == "backward" and self._after_forward is None:
            self._after_forward = read_state(self.model)
        elif phase != "backward":
            self.close()

    def close(self) -> None:
        """Ends the backward under way, if there is one."""
        if self._after_forward is None:
            return
        before, after = self._after_forward, read_state(self.model)
        self._after_forward = None
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in self.changes and not same_state(before.get(key), after.get(key)):
                block, name, kind = key
                self.changes[key] = StateChange(
                    block=block, name=name, kind=kind,
                    after_forward=short(before.get(key)), after_backward=short(after.get(key)),
                )  # fmt: skip


def read_state(model: nn.Module) -> State:
    """Copies of every buffer and every plain attribute below `model`, by block and name."""
    state: State = {}
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                state[fqn, name, "buffer"] = buffer.detach().clone()
        for name, value in vars(module).items():
            if name not in _OWN and not name.startswith(("_forward", "_backward", "_state_dict", "_load_state")):
                state[fqn, name, "attribute"] = frozen(value)
    return state


def frozen(value: Any, depth: int = 0) -> Any:
    """`value` as plain data that later changes cannot reach: tensors copied, containers walked, objects by type."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, str, bytes, numbers.Number)):
        return value
    if depth == _MAX_DEPTH:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return {repr(key): frozen(item, depth + 1) for key, item in list(value.items())[:_MAX_ITEMS]}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [len(value), *(frozen(item, depth + 1) for item in list(value)[:_MAX_ITEMS])]
    if isinstance(value, (nn.Module, torch.Generator)):
        return type(value).__qualname__  # modules are walked by themselves, generators belong to the RNG report
    inside = getattr(value, "__dict__", None)
    if callable(value) or not isinstance(inside, dict) or not inside:
        return type(value).__qualname__
    return [type(value).__qualname__, frozen(inside, depth + 1)]


def same_state(left: Any, right: Any) -> bool:
    """Whether two frozen values are equal, tensors bit by bit; NaN equals NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return same_bits(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_state, left, right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def short(value: Any) -> str:
    """A frozen value in a few words."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return _cut(f"{value.item():.6g}" if value.is_floating_point() else str(value.item()))
        first = ", ".join(f"{number:.5g}" for number in value.flatten()[:3].tolist())
        return f"{first}, … ({' x '.join(map(str, value.shape))})"
    if isinstance(value, list) and value and isinstance(value[0], int):
        return f"{value[0]} items"
    if isinstance(value, list):
        return str(value[0]) if value else "empty"
    if isinstance(value, dict):
        return f"{len(value)} items"
    return "absent" if value is None else _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
