"""A dialect is how one program says what it recomputes. Its readers share the layers they count and the reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from explorer.errors import InvalidPolicy, UnreadableFile, message_of
from explorer.plan.export.target import STATISTICS
from explorer.plan.imports.settings import Settings
from explorer.plan.names import Fqns, above, is_within
from explorer.plan.policy.file import file_of
from explorer.record.base import from_plain
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit
from explorer.record.policy_file import Reading


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A program whose settings are read."""

    name: str
    written_for: str
    says: Callable[[str], bool]
    """Whether a path of the settings chooses what this program recomputes."""
    read: Callable[[Settings, ModelGraph], Reading]


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a reader made of settings, before it is a policy."""

    units: Sequence[Unit] = ()
    options: tuple[tuple[str, Any], ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def reading(written_for: str, graph: ModelGraph, meant: Said) -> Reading:
    """`meant` as a policy of `graph`. Where a block has running statistics, they move twice as they do there."""
    blocks = [fqn for unit in meant.units for fqn in unit.blocks]
    moves = any(graph.by_fqn[fqn].running_statistics for fqn in blocks)
    options = {**({"running_stats": "every_forward"} if moves else {}), **dict(meant.options)}
    try:
        policy = msgspec.structs.replace(from_plain(options, Policy), units=tuple(meant.units))
    except UnreadableFile as error:  # a list where true or false is meant
        raise refused(written_for, f"{message_of(error)}") from error
    return Reading(
        source=written_for,
        file=file_of(policy, graph),
        fit="approximated" if meant.reasons else "exact",
        reasons=meant.reasons,
        notes=(*meant.notes, *((STATISTICS,) if moves else ())),
    )


_UNREAD = {
    "accelerate": ("fsdp_activation_checkpointing", "wraps the layers that FSDP wraps, by their class"),
    "Composer or llm-foundry": ("fsdp_config.activation_checkpointing", "wraps the blocks that its model names"),
}
"""Programs whose settings name no blocks: a setting that tells them, and what it does."""


def refuse_unread(settings: Settings) -> None:
    """Raises InvalidPolicy that names the program, where `settings` are those of one that is not read."""
    for program, (name, does) in _UNREAD.items():
        for path, value in settings.items():
            if path == name or path.endswith(f".{name}"):
                raise refused(
                    program, f"{path} is {value!r}, which {does}; their names do not stand there.", _NAME_THEM
                )


_NAME_THEM = "Name the blocks in a policy file, or write `gradient_checkpointing: true` where all layers are meant."


def whole(fqns: Iterable[str]) -> tuple[Unit, ...]:
    return tuple(Unit(blocks=(fqn,)) for fqn in fqns)


def refused(written_for: str, why: str, hint: str = "") -> InvalidPolicy:
    return InvalidPolicy(
        f"These settings of {written_for} cannot be said as a policy: {why}",
        hint=hint or "Choose blocks on the page, or name them in a policy file.",
    )


def layer_lists(graph: ModelGraph) -> dict[str, Fqns]:
    """Lists of layers by their holder: numbered blocks that hold others, none of them inside another."""
    lists: dict[str, Fqns] = {}
    for block in graph.blocks:
        numbered = block.name.isdecimal() and block.n_calls and graph.children[block.fqn]
        if numbered and not any(name.rpartition(".")[2].isdecimal() for name in above(block.fqn)):
            holder = block.fqn.rpartition(".")[0]
            lists[holder] = (*lists.get(holder, ()), block.fqn)
    return lists


def longest_list(written_for: str, graph: ModelGraph) -> tuple[str, Fqns]:
    """The layers of a model as programs with one list of them count. Raises InvalidPolicy where there is none."""
    lists = layer_lists(graph)
    if not lists:
        raise refused(written_for, f"{graph.model.target} has no numbered layers.")
    holder = max(lists, key=lambda one: (one.endswith("layers"), len(lists[one])))
    return holder, lists[holder]


def within(graph: ModelGraph, layers: Fqns, names: Iterable[str]) -> Fqns:
    """Blocks inside of `layers` that are called one of `names`."""
    known = set(names)
    return tuple(
        block.fqn
        for block in graph.blocks
        if block.name in known and block.n_calls and any(is_within(block.fqn, layer) for layer in layers)
    )
