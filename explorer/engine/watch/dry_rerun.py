"""Runs each block a second time after the model's forward, as a recompute would, and compares.

    forward      0 ─▶ 1 ─▶ 2 ─▶ loss     arguments, generators and results of each block are noted
    dry rerun    2, 1, 0                 as in backward: the latest block first, in the state that forward left

Traits of operators and of moved state name a cause (rerun_traits.py, state_changes.py). A dry rerun needs no cause: a
context variable that is set for the forward only, a global, an attribute that the model takes back.

Each block runs again once, so the whole costs one forward: blocks of lists, and other blocks without a list inside.
Results of a block are not compared if they or its arguments are written into later, or if hooks may replace them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.policy.units import Recomputing
from explorer.engine.state.bits import same_bits
from explorer.engine.state.reachable import reachable_generators
from explorer.engine.state.rng import OutsideRng, RngState
from explorer.engine.state.state_diff import same_state
from explorer.engine.watch.entries import EntryCall, EntryWatch, Place
from explorer.engine.watch.forward import ForwardWatch, NoteTaker, dense_tensors
from explorer.engine.watch.state_changes import moved_names, state_pictures
from explorer.plan.names import above, is_within, outermost
from explorer.record.failure import is_out_of_memory
from explorer.record.graph import Trait

_MOST_CALLS = 64
"""Calls of one block that run again; a recurrent net may call a block for each of its inputs."""
_EXPLAINED: frozenset[Trait] = frozenset(  # fmt: skip
    {
        "moves_buffers",
        "reads_statistics",
        "hidden_state",
        "own_generator",
        "keeps_cache",
        "takes_stored",
        "changes_inputs",
    }
)
"""Traits that say already why a block departs when it runs again."""


@dataclass
class _Call:
    """A call of a block, with all that its rerun needs."""

    fqn: str
    args: Any
    kwargs: Any
    rng: RngState
    generators: tuple[object, ...]
    """States of the generators that the model holds."""
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    inputs: list[tuple[Tensor, int]]
    """Tensors among the arguments, with their versions."""
    entry: EntryCall | None
    outputs: list[tuple[Tensor, int]] | None = None
    """None if the call failed or runs without gradients: nothing runs it again."""


class DryRerun(NoteTaker):
    """Notes a forward; `run` then runs the blocks again."""

    def __init__(self, model: nn.Module) -> None:
        self.departs: set[str] = set()
        """Blocks whose rerun returns something else, or fails."""
        self.moves_shared: dict[str, dict[str, None]] = defaultdict(dict)
        """By block, names of data outside of all modules that change whenever it runs."""
        self.late_reads: dict[str, dict[str, str]] = defaultdict(dict)
        """By block, names of the values that its code reads and that differ in the rerun, each with a text."""
        self._model = model
        self._modules = {fqn: module for fqn, module in model.named_modules() if fqn in _blocks(model)}
        self._hooked = {fqn for fqn, module in self._modules.items() if module._forward_hooks}
        self._own = OutsideRng(own=tuple(reachable_generators(model)))
        self._entries = EntryWatch(model)
        self._open: list[_Call] = []
        self._calls: dict[str, list[_Call]] = defaultdict(list)
        self._order: list[_Call] = []
        self._moved_again: set[tuple[str, str]] = set()
        """Block and name of attributes with another value after the rerun."""
        self._replaced: dict[str, set[str]] = {}

    def begins(self, fqn: str, args: Any, kwargs: Any) -> None:
        if fqn not in self._modules:
            return
        call = _Call(
            fqn=fqn, args=args, kwargs=kwargs, rng=RngState.capture(), generators=self._own.read(),
            autocast=_autocast(), inputs=_versions((args, kwargs)), entry=None,
        )  # fmt: skip
        if not self._calls[fqn]:
            call.entry = EntryCall(fqn, (self._modules[fqn],))
            self._entries.begin(call.entry)
        self._open.append(call)

    def left(self, fqn: str, output: object) -> None:
        if not self._open or self._open[-1].fqn != fqn:
            return
        call = self._open.pop()
        if call.entry is not None:
            self._entries.end(call.entry)
        tensors = dense_tensors(output)
        repeats = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if repeats and len(self._calls[fqn]) < _MOST_CALLS:
            call.outputs = _versions(tensors)
            self._calls[fqn].append(call)
            self._order.append(call)

    def run(self, *, lets_go: bool) -> None:
        """Runs the noted calls again, the last one first. The state of the model moves on."""
        before = state_pictures(self._model)
        try:
            _inside_a_backward(partial(self._repeat_all, lets_go=lets_go))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            self._order.clear()
            self._calls.clear()
        self._replaced = moved_names(self._model, before)
        for read in self._entries.reads.values():
            text = f"{read.owner}.{read.name}".lstrip(".")
            self.late_reads[read.block][text] = f"{text} ({read.in_forward} in forward, then {read.in_recompute})"

    def _repeat_all(self, *, lets_go: bool) -> None:
        while self._order:
            self._repeat(self._order.pop(), lets_go=lets_go)

    def _repeat(self, call: _Call, *, lets_go: bool) -> None:
        if not _unchanged(call.inputs):
            return
        module = self._modules[call.fqn]
        before = self._entries.again(call.entry) if call.entry is not None else {}
        call.rng.restore()
        self._own.write(call.generators)
        outputs: list[Tensor] | None = None
        try:
            with ExitStack() as opened:
                for device, enabled, dtype in call.autocast:  # torch's checkpoint sets autocast back too
                    opened.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                opened.enter_context(torch.enable_grad())
                opened.enter_context(Recomputing((module,)))
                opened.enter_context(ForwardWatch(self._model, (), lets_go=lets_go))
                outputs = dense_tensors(module.forward(*call.args, **call.kwargs))
        except Exception as error:
            if is_out_of_memory(error):
                raise
        if call.entry is not None:
            self._note_moved(call.entry, before, self._entries.look(call.entry))
        if call.fqn not in self._hooked and not _same_outputs(call.outputs or [], outputs):
            self.departs.add(call.fqn)

    def _note_moved(self, call: EntryCall, before: Mapping[Place, object], after: Mapping[Place, object]) -> None:
        for place in before.keys() | after.keys():
            if same_state(before.get(place), after.get(place)):
                continue
            owner, name, _ = place
            if owner:
                self._moved_again.add((owner, name))
            elif call.moved.get(place) and not self._entries.guards_itself(call):
                self.moves_shared[call.block][name] = None

    def settle(self, later: DryRerun | None) -> None:
        """Keeps the late reads that `later`, the dry rerun of another forward, has too. None: that forward failed.

        A table that the first call fills is empty at one entry and full at every later one.
        """
        for fqn, reads in self.late_reads.items():
            lasting = later.late_reads.get(fqn, {}) if later is not None else {}
            self.late_reads[fqn] = {name: text for name, text in reads.items() if name in lasting}

    def writes_the_same(self, fqn: str, names: set[str]) -> bool:
        """Whether a rerun writes equal values to the attributes `names` of a module that forward changes."""
        unit = next((block for block in self._modules if is_within(fqn, block)), None)
        if unit is None or unit in self.departs or not names <= self._replaced.get(fqn, set()):
            return False
        return not any((fqn, name) in self._moved_again for name in names)

    def traits(self, traits: Mapping[str, set[Trait]]) -> Iterator[tuple[str, Trait]]:
        """Block and trait of each finding that `traits`, all other traits by block, do not explain."""
        for fqn in self._modules:
            inside = set().union(*(noted for name, noted in traits.items() if is_within(name, fqn)))
            if fqn in self.departs and not inside & _EXPLAINED:
                yield fqn, "departs"
            if self.late_reads.get(fqn):
                yield fqn, "reads_late"
            if self.moves_shared.get(fqn) and "hidden_state" not in inside:
                yield fqn, "moves_shared"


def _blocks(model: nn.Module) -> frozenset[str]:
    """Blocks that run again: numbered ones of lists and of chains of larger blocks, and others without such inside."""
    modules = dict(model.named_modules())
    lists = (nn.ModuleList, nn.ModuleDict)
    numbered = [
        fqn
        for fqn, module in modules.items()
        if fqn.rpartition(".")[2].isdigit()
        and (isinstance(modules[fqn.rpartition(".")[0]], lists) or next(module.children(), None) is not None)
    ]
    tops = outermost(numbered)
    holders = set(above(*tops))
    others = outermost(
        fqn for fqn, module in modules.items() if fqn and fqn not in holders and not isinstance(module, lists)
    )
    return frozenset(tops) | frozenset(others)


def _inside_a_backward(work: Callable[[], None]) -> None:
    """Calls `work` where torch runs a block again, so that code which guards itself against a recompute does so here.

    torch's own checkpoint imports the compiler at its first call, which takes two seconds.
    """

    def recompute_fn(gradient: Tensor) -> None:  # torch's name, by which code may look for a recompute on the stack
        work()

    value = torch.ones((), requires_grad=True)
    value.register_hook(recompute_fn)
    value.sin().backward()


def _versions(values: object) -> list[tuple[Tensor, int]]:
    """Each tensor without its graph, and its version."""
    return [(t.detach(), -1 if t.is_inference() else t._version) for t in dense_tensors(values)]


def _unchanged(versions: list[tuple[Tensor, int]]) -> bool:
    return all(tensor.is_inference() or tensor._version == version for tensor, version in versions)


def _same_outputs(first: list[tuple[Tensor, int]], again: list[Tensor] | None) -> bool:
    """Whether the outputs are equal bit by bit; true if forward wrote into them later, so that no one can tell."""
    if not _unchanged(first):
        return True
    if again is None or len(first) != len(again):
        return False
    return all(same_bits(tensor, other.detach()) for (tensor, _), other in zip(first, again))


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in devices)
