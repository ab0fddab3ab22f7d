"""Calls of a policy's units, kept in a forward and recomputed later, as often as the probe asks.

probe.py says when and compares what the recomputes leave; this file runs them as torch.utils.checkpoint would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from explorer.engine.bench.step import Trainee
from explorer.engine.compare.equal_units import signature
from explorer.engine.model.equal_models import copy_batch
from explorer.engine.policy import units
from explorer.engine.policy.units import Recomputing, Wrap
from explorer.engine.state.bits import contents, tensor_leaves
from explorer.engine.state.rng import RngState
from explorer.engine.watch.scopes import without_operation
from explorer.plan.names import Fqns
from explorer.record.allocations import Phase

_LARGEST = 4.0
"""Power of two by which the first perturbed input is scaled; later ones lie nearer to the unit's own, on both sides.

The largest and the smallest value of a window then differ between windows of any two lengths.
"""
_NOISE = 0.1

Inputs = Literal["perturbed", "equal"]
"""Whether every other input is perturbed and other units run once on each, or other units are not recomputed."""
Kind = TypeVar("Kind")


class _Stop(Exception):
    """Ends a recompute at the last tensor that it has to make."""


@dataclass(eq=False)
class UnitCall:
    """One call of a unit in forward, with all that a recompute needs."""

    wrap: Wrap
    function: Callable[..., object]
    modules: Sequence[nn.Module]
    inputs: object
    """Copies of arguments and keyword arguments."""
    rng: RngState
    is_needed: bool
    """Whether backward reads a tensor that the call saved."""
    n_saved: int = 0

    @property
    def unit(self) -> Fqns:
        return self.wrap.unit.blocks

    def recompute(self, number: int | None = None) -> list[Tensor]:
        """Runs the unit as its policy does in backward, on perturbed inputs if a `number` is given.

        Returns sums over the bits of all tensors that the unit makes.
        """
        reentrant = self.wrap.policy.use_reentrant
        inputs = self.inputs if number is None else tree_map(partial(_perturbed, number), self.inputs)
        return [part for grad in ((False, True) if reentrant else (True,)) for part in self._run(inputs, grad)]

    def _run(self, inputs: Any, grad: bool) -> list[Tensor]:
        n_left, sums = self.n_saved, list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            nonlocal n_left
            n_left -= 1
            sums.extend(map(_sum, contents(tensor)))
            if not n_left and self.wrap.policy.stops_early:
                raise _Stop
            return without_operation(tensor)

        self.rng.restore()
        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        with suppress(_Stop), torch.set_grad_enabled(grad), Recomputing(self.modules), hooks:
            # A copy of a copy is no leaf, so that a unit may write into its input.
            args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
            output = self.function(*args, **kwargs)
            sums += [_sum(bits) for leaf in tensor_leaves(output) for bits in contents(leaf)]
        return sums


def _perturbed(number: int, leaf: object) -> object:
    """A floating tensor scaled, up and down in turns, with noise; zeros and infinities stay. Other leaves unchanged."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.layout != torch.strided:
        return leaf
    power = _LARGEST / (number + 1) * (-1) ** number
    noise = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(number)).to(leaf.device)
    with torch.no_grad():
        scaled = leaf * (2.0**power * (1 + _NOISE * (noise - 0.5))).to(leaf.dtype)
    return scaled.requires_grad_(leaf.requires_grad)


def _sum(bits: Tensor) -> Tensor:
    return bits.sum(dtype=torch.int32)  # overflow is no harm, and torch sums wider integers ten times slower


class CheckpointStandIn:
    """Stands in for torch.utils.checkpoint: units run without it, and their calls in the first forward are kept."""

    def __init__(self, trainee: Trainee) -> None:
        self.calls: list[UnitCall] = []
        self._model = trainee.model
        self._open: list[UnitCall] = []
        self._is_first_forward = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context around a policy and its steps."""
        with_checkpoint, units._run = units._run, self._run
        try:
            yield
        finally:
            units._run = with_checkpoint

    def on_phase(self, phase: Phase) -> None:
        self._is_first_forward = self._is_first_forward and phase == "forward"

    def _run(
        self, wrap: Wrap, function: Callable[..., object], modules: Sequence[nn.Module], args: Any, kwargs: Any
    ) -> object:
        if not self._is_first_forward or wrap.unit.action == "offload" or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        inputs, rng = copy_batch((args, kwargs)), RngState.capture(self._model)
        call = UnitCall(wrap, function, modules, inputs, rng, wrap.policy.use_reentrant)
        self.calls.append(call)
        self._open.append(call)
        try:
            with nullcontext() if len(self._open) > 1 else saved_tensors_hooks(self._pack, _unpack):
                return function(*args, **kwargs)
        finally:
            self._open.pop()

    def _pack(self, tensor: Tensor) -> tuple[tuple[UnitCall, ...], Tensor]:
        """A tensor of a nested unit counts for the units around it too: they make the unit's input."""
        for call in self._open:
            call.n_saved += 1
        return tuple(self._open), without_operation(tensor)


def _unpack(packed: tuple[tuple[UnitCall, ...], Tensor]) -> Tensor:
    for call in packed[0]:
        call.is_needed = True
    return packed[1]


def inside_a_recompute(work: Callable[[], Kind], device: torch.device, *, use_reentrant: bool) -> Kind:
    """Calls `work` where torch runs a block again: in a backward, below the functions of torch.utils.checkpoint."""
    is_forward, results = True, list[Kind]()

    def region(value: Tensor) -> Tensor:
        nonlocal is_forward
        if not is_forward:
            with torch.no_grad():  # the region's own hooks must see none of the saved tensors
                results.append(work())
        is_forward = False
        return value.sin()

    value = torch.ones((), device=device, requires_grad=True)
    checkpoint(region, value, use_reentrant=use_reentrant).backward()
    return results[0]


def repeated_units(calls: Sequence[UnitCall]) -> set[Fqns]:
    """Units that can remember nothing and equal an earlier one: two runs of them say what more would say."""
    signatures: dict[Fqns, tuple[Hashable, ...]] = defaultdict(tuple)
    for call in calls:
        signatures[call.unit] += (signature(call.modules, call.inputs),)
    provable = {unit: shapes for unit, shapes in signatures.items() if None not in shapes}
    first: dict[Hashable, Fqns] = {}
    return {unit for unit, shapes in provable.items() if first.setdefault(shapes, unit) != unit}


def recompute_calls(
    calls: Sequence[UnitCall], n_runs: int, chosen: tuple[Fqns, ...] | None, inputs: Inputs, twice: Collection[Fqns]
) -> dict[Fqns, None]:
    """Recomputes each call of the `chosen` units `n_runs` times, two times in turn on the same inputs.

    Calls of other units run once on each input, or not at all if no input is perturbed. Units in `twice` run two times.
    Returns the units with unequal recomputes of equal inputs.
    """
    first: dict[tuple[UnitCall, int | None], list[int]] = {}
    unlike: dict[Fqns, None] = {}
    for n in range(n_runs):
        i = n // 2
        number = i // 2 if inputs == "perturbed" and i % 2 else None
        for call in reversed(calls):
            if n >= 2 and call.unit in twice:
                continue
            is_chosen = chosen is None or call.unit in chosen
            if not is_chosen and (inputs == "equal" or n % 2):
                continue
            sums = [int(part) for part in call.recompute(number)]
            if first.setdefault((call, number), sums) != sums:
                unlike[call.unit] = None
    return unlike
