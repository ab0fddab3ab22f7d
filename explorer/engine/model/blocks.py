"""Facts of blocks from their modules, the chain of blocks that make up the model, repeated blocks, possible cuts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from string import digits as DIGITS
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from explorer.engine.state.bits import n_bytes
from explorer.engine.watch.block_facts import BlockFacts
from explorer.engine.watch.edges import ELSEWHERE, GIVEN, Datum
from explorer.record.graph import CutPoint

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def module_fields(fqn: str, module: nn.Module) -> dict[str, Any]:
    """Fields of a Block from its module, for described models and for recorded steps alike."""
    return {
        "fqn": fqn,
        "kind": type(module).__name__,
        "parameter_bytes": n_bytes(*module.parameters()),
        "buffer_bytes": n_bytes(*module.buffers()),
        "own_parameters": tuple(
            f"{fqn}.{name}".lstrip(".") for name, parameter in module._parameters.items() if parameter is not None
        ),
    }


def has_running_statistics(module: nn.Module) -> bool:
    """Whether `module` is a norm of torch whose forward updates a mean and a variance."""
    return isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None


def repeated_as(modules: Mapping[str, nn.Module], facts: Mapping[str, BlockFacts]) -> dict[str, str]:
    """fqn -> first block of the run, for consecutive equal siblings with equal operators.

    Members of a container are siblings, and attributes whose names differ in a number (`layer0`, `layer1`) if they are
    called one after another.
    """
    first: dict[str, str] = {}
    for fqn, module in modules.items():
        names = (f"{fqn}.{name}".lstrip(".") for name, _ in module.named_children())
        children = [child for child in names if child in facts]
        consecutive_calls = set(pairwise(sorted(children, key=lambda child: facts[child].first_call)))
        for before, child in pairwise(children):
            numbered = before.rstrip(DIGITS) == child.rstrip(DIGITS)
            siblings = isinstance(module, CONTAINERS) or (numbered and (before, child) in consecutive_calls)
            if siblings and _alike(modules[before], modules[child], facts[before], facts[child]):
                first[child] = first.get(before, before)
    return first


def _alike(module: nn.Module, other: nn.Module, facts: BlockFacts, facts_other: BlockFacts) -> bool:
    """Whether both are built alike (class, settings, parameter shapes) and ran the same operators as often."""
    return (
        facts.n_calls > 0
        and (facts.n_calls, facts.signature) == (facts_other.n_calls, facts_other.signature)
        and repr(module) == repr(other)
        and _parameters(module) == _parameters(other) != []
    )


def _parameters(module: nn.Module) -> list[tuple[str, tuple[int, ...], object]]:
    return [(name, tuple(p.shape), p.dtype) for name, p in module.named_parameters()]


def chain_of(modules: Mapping[str, nn.Module], facts: Mapping[str, BlockFacts]) -> tuple[str, ...]:
    """Blocks in order of their first call. A block is opened if a container inside has several children of one kind.
    These children are not opened again. Containers that are never called are always opened."""
    members = {fqn for container in modules for fqn in _kin(container, modules, facts)}
    opened = {""}
    for member in members:
        parts = member.split(".")[:-1]
        prefixes = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if not members.intersection(prefixes):
            opened.update(prefixes)

    def walk(fqn: str) -> list[str]:
        chain: list[str] = []
        for name, child in modules[fqn].named_children():
            this = f"{fqn}.{name}".lstrip(".")
            if this not in facts:
                continue
            never_called = not facts[this].n_calls
            if this in opened or (never_called and isinstance(child, CONTAINERS)):
                chain.extend(walk(this))
            elif not never_called:
                chain.append(this)
        return chain

    units = walk("")
    return tuple(sorted(units, key=lambda fqn: facts[fqn].first_call)) or ("",)


def _kin(container: str, modules: Mapping[str, nn.Module], facts: Mapping[str, BlockFacts]) -> list[str]:
    """Called children of a container that share their class with another called child."""
    if not isinstance(modules[container], CONTAINERS):
        return []
    called = {f"{container}.{name}".lstrip("."): child for name, child in modules[container].named_children()}
    kinds = {fqn: type(child) for fqn, child in called.items() if fqn in facts and facts[fqn].n_calls}
    count = Counter(kinds.values())
    return [fqn for fqn, kind in kinds.items() if count[kind] > 1]


def cut_points(chain: Sequence[str], facts: Mapping[str, BlockFacts], data: Sequence[Datum]) -> tuple[CutPoint, ...]:
    """A cut between each two consecutive units, with the crossing data. A cut with a unit on both sides is refused.

    `chain` is in order of the first calls, so each datum and each unit is added once and dropped once.
    """
    cuts = []
    to_come = deque(sorted((d for d in data if d.writer not in (GIVEN, ELSEWHERE)), key=lambda datum: datum.born))
    crossing: list[Datum] = []
    both: list[str] = []
    for after, before in pairwise(chain):
        border = facts[before].first_call
        while to_come and to_come[0].born < border:
            crossing.append(to_come.popleft())
        crossing = [datum for datum in crossing if datum.last_read is not None and datum.last_read >= border]
        both = [fqn for fqn in (*both, after) if facts[fqn].last_exit > border]
        refusal = f"{', '.join(both)} is called again behind this cut" if both else None
        cuts.append(
            CutPoint(
                after=after,
                before=before,
                n_bytes=sum(datum.n_bytes for datum in crossing),
                n_tensors=len(crossing),
                refusal=refusal,
            )
        )
    return tuple(cuts)
