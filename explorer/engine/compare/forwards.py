"""Finds the first block in which the forwards of two programs differ, from inputs and outputs of one step of each.

Sketches (norm and two projections) replace inputs and outputs, so that no activation is kept. The compared steps run
without these hooks, because a hook may change how a model runs. step_program.py runs the steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from explorer.engine.compare.diffs import in_double, is_floating
from explorer.engine.model.plain_names import plain_modules
from explorer.record.comparison import ForwardDiff

_ROUNDS = 256
"""Units in the last place by which two sketches of one activation may differ."""
Sketch = tuple[tuple[Any, ...], ...]


@dataclass
class Forwards:
    """Calls of a model's blocks during one step, by plain name, in the order in which they end."""

    model: nn.Module
    calls: dict[tuple[str, int], tuple[Sketch, Sketch, str]] = field(default_factory=dict)
    """Input, output and description of each block's n-th call."""
    order: dict[str, None] = field(default_factory=dict)
    """Blocks in the order in which they are first entered."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context around one step."""
        counts: dict[str, int] = defaultdict(int)
        inputs: dict[str, list[Sketch]] = defaultdict(list)

        def enter(fqn: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                self.order.setdefault(fqn)
                inputs[fqn].append(_sketch((args, kwargs)))

            return hook

        def leave(fqn: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                given = inputs[fqn].pop()
                if torch._C._current_graph_task_id() == -1:  # a forward inside backward is a recompute
                    self.calls[fqn, counts[fqn]] = (given, _sketch(output), _description(module))
                    counts[fqn] += 1

            return hook

        with ExitStack() as hooks:
            for fqn, module in plain_modules(self.model):
                hooks.callback(module.register_forward_pre_hook(enter(fqn), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave(fqn)).remove)
            yield


def forward_difference(baseline: Forwards, candidate: Forwards) -> ForwardDiff:
    """The first call, in the order of the baseline, whose output differs for the same input."""
    common = [key for key in baseline.calls if key in candidate.calls]
    diff = ForwardDiff(
        n_calls=_n_calls(baseline, candidate),
        n_compared=len(common),
        order=tuple(baseline.order),
        same=all(repr(baseline.calls[key][1]) == repr(candidate.calls[key][1]) for key in common),  # NaN too
    )
    for key in common:
        one, other = baseline.calls[key], candidate.calls[key]
        if _same(one[0], other[0]) and not _same(one[1], other[1]):
            fields = {name: getattr(diff, name) for name in ("n_calls", "n_compared", "order", "same")}
            return ForwardDiff(**fields, block=key[0], in_baseline=one[2], in_candidate=other[2])
    return diff


def _n_calls(*sides: Forwards) -> tuple[int, int]:
    one, other = (sum(fqn == "" for fqn, _ in side.calls) for side in sides)
    return one, other


def _description(module: nn.Module) -> str:
    """The module as text: `LayerNorm(16, eps=1e-05) in eval mode`. The class alone if the module has children."""
    own = "" if next(module.children(), None) is not None else f"({module.extra_repr()})"
    return f"{type(module).__name__}{own}{'' if module.training else ' in eval mode'}"


def _sketch(values: Any) -> Sketch:
    return tuple(_of_tensor(leaf.detach()) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    flat = in_double(tensor).flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    places = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
    projections = [float(torch.dot(flat, torch.cos(places * angle + angle))) for angle in (0.7, 2.3)]
    epsilon = torch.finfo(tensor.dtype).eps if is_floating(tensor) else 0.0
    return tuple(tensor.shape), tensor.dtype, epsilon, float(flat.norm()), *projections


def _same(left: Sketch, right: Sketch) -> bool:
    """Whether two sketches are equal up to rounding of at most _ROUNDS units in the last place."""
    return len(left) == len(right) and all(
        one[:2] == other[:2]
        and all(
            abs(a - b) <= min(_ROUNDS * one[2], math.sqrt(one[2])) * one[3] or a == b or a != a
            for a, b in zip(one[3:], other[3:])
        )
        for one, other in zip(left, right)
    )
