"""Settings of a training program as a flat table, and a policy made of what they mean.

The table has one form for YAML, JSON, TOML, flags and a call in Python. `--activation_checkpoint.mode=full`,
`[activation_checkpoint]` with `mode = "full"`, and the same nested in YAML are all
`{"activation_checkpoint.mode": "full"}`. Nothing is executed; a text of another kind gives an empty table.
`programs` reads the tables; the layers that they count are found here.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from explorer.errors import BadInput, InvalidPolicy, UnreadableFile, message_of
from explorer.plan.export.target import STATISTICS
from explorer.plan.names import Fqns, above, lineage
from explorer.plan.policy.file import file_of
from explorer.plan.policy.strict_yaml import Document
from explorer.record.base import from_plain
from explorer.record.files import Reading
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit

Settings = Mapping[str, Any]
"""Dotted path and value. Dashes become underscores, and null values are left out."""

_MOST_DOTS = 500
_MOST_CHARACTERS = 50_000
"""Limit of a text that is neither YAML nor JSON."""


def settings_of(text: str, plain: object) -> Settings:
    """The table of `text`. `plain` is the value of `text` as YAML, or None.

    Raises UnreadableFile if one path has two values, and for a shell script with flags.
    """
    for form in (_nested(plain), *(form(text) for form in (_toml, _call, _flags) if len(text) <= _MOST_CHARACTERS)):
        if pairs := list(form):
            return _one_each(pairs)
    if flag := _RECOMPUTE_FLAG.search(text):
        raise UnreadableFile(
            f"This is no settings file, but a script in which the flag {flag[0]} stands; scripts are not read.",
            hint=f'Paste its flags in one line: `check --flags "{flag[0]} ..." MODEL`.',
        )
    return {}


_RECOMPUTE_FLAG = re.compile(r"--(recompute[-_]\w[\w-]*|(activation|gradient)[-_]checkpoint\w*[\w.-]*)")
_NAME = re.compile(r"\w[\w.-]*")
_FLAG = re.compile(r"--|[\w.-]*activation[_-]checkpoint:")
"""A flag, or a subcommand of torchtitan: `activation_checkpoint:full`."""


def last(path: str) -> str:
    return path.rpartition(".")[2]


def _one_each(pairs: list[tuple[str, object]]) -> Settings:
    table: dict[str, object] = {}
    for path, value in pairs:
        if value is None:
            continue
        if table.setdefault(path, value) != value:
            raise UnreadableFile(f"{path} is given twice: {table[path]} and {value}.", hint="Leave out one of the two.")
    return table


def _toml(text: str) -> Iterator[tuple[str, object]]:
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        return  # tomllib takes gigabytes for a key of many parts
    try:
        plain = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return
    yield from _flat(plain)


def _nested(plain: object) -> Iterator[tuple[str, object]]:
    """YAML or JSON. Flags and Python are often YAML too, but then a key is no name."""
    if isinstance(plain, dict) and all(_NAME.fullmatch(key) for key in plain):
        yield from _flat(plain)


def _call(text: str) -> Iterator[tuple[str, object]]:
    """`TrainingArguments(gradient_checkpointing=True)`, `model.gradient_checkpointing_enable()`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).rpartition(".")[2]
        if name.endswith("_checkpointing_enable"):
            yield name.removesuffix("_enable"), True
            yield from _literal(f"{name.removesuffix('_enable')}_kwargs", call.args[:1])
        for keyword in call.keywords:
            yield from _literal(keyword.arg or "", [keyword.value])


def _literal(name: str, values: list[ast.expr]) -> Iterator[tuple[str, object]]:
    """Values that are literals; computed values are left out."""
    for value in values:
        with suppress(ValueError):
            yield from _flat({name: ast.literal_eval(value)})


def _flags(text: str) -> Iterator[tuple[str, object]]:
    """`--recompute-num-layers 4`, `--fp16`, `--activation_checkpoint.mode=full`, `activation_checkpoint:full`.

    The text begins with a flag. A word before it would be a command, and a shell's variables have no value here.
    """
    try:
        tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return
    if not tokens or not _FLAG.match(tokens[0]):
        return
    name, values = "", []
    for token in [*tokens, "--"]:
        if not _FLAG.match(token):
            values.append(token)
            continue
        if name:
            read = [_value(value) for value in values]
            yield from _flat({name: read if len(read) > 1 else next(iter(read), True)})
        name, values = "", []
        if not token.startswith("--"):
            yield "activation_checkpoint.mode", token.partition(":")[2].replace("-", "_")
        else:
            name, equals, value = token.removeprefix("--").partition("=")
            values = [value] if equals else []


def _value(text: str) -> object:
    """`text` as YAML (`2`, `true`, `{"use_reentrant": false}`), or `text` itself if it is no YAML."""
    try:
        return Document(text).plain
    except BadInput:
        return text


def _flat(plain: Mapping[Any, object], above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in plain.items():
        path = f"{above}{str(key).removeprefix('--')}".replace("-", "_")
        inner = _value(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{path}.")
        else:
            yield path, inner


@dataclass(frozen=True)
class SettingsFormat:
    """A program whose settings are read: which of its settings count, and the policy that they mean."""

    name: str
    written_for: str
    is_setting: Callable[[str], bool]
    """Whether a path of the table chooses what this program recomputes."""
    meaning: Callable[[Settings, ModelGraph], Meaning]
    """Raises CannotSay."""

    def read(self, settings: Settings, graph: ModelGraph) -> Reading:
        """The policy of `settings` on `graph`. Running statistics move twice a step, as they do in the program."""
        try:
            meaning = self.meaning(settings, graph)
            n_more = len(meaning.reasons) - _MOST_REASONS
            reasons = (*meaning.reasons[:_MOST_REASONS], *((f"{n_more:,} more are left out.",) if n_more > 0 else ()))
            moves = any(graph.by_fqn[fqn].running_statistics for unit in meaning.units for fqn in unit.blocks)
            options = {**({"running_stats": "every_forward"} if moves else {}), **meaning.options}
            policy = replace(from_plain(options, Policy), units=tuple(meaning.units))
        except CannotSay as error:
            raise refused(self.written_for, error.why, error.hint) from error
        except UnreadableFile as error:  # a list where true or false is meant
            raise refused(self.written_for, message_of(error)) from error
        return Reading(
            source=self.written_for,
            file=file_of(policy, graph),
            fit="approximated" if reasons else "exact",
            reasons=reasons,
            notes=(*meaning.notes, *((STATISTICS,) if moves else ())),
        )


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The units and options that settings ask for, what is lost, and remarks."""

    units: Sequence[Unit] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class CannotSay(Exception):
    """The reason why no policy has the meaning of some settings, and what to do instead."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


_MOST_REASONS = 20


def number_in(text: str) -> int | None:
    """The number of layers that a text says; None if it says none, or one beyond every model."""
    return int(text) if text.isdecimal() and len(text) < 10 else None


_UNREAD = {
    "accelerate": ("fsdp_activation_checkpointing", "wraps the layers that FSDP wraps, by their class"),
    "Composer or llm-foundry": ("fsdp_config.activation_checkpointing", "wraps the blocks that its model names"),
}
"""Programs whose settings name no blocks: a setting that identifies the program, and what it does."""


def refuse_unread(settings: Settings) -> None:
    """Raises InvalidPolicy with the name of the program if `settings` belong to one that is not read."""
    for program, (name, does) in _UNREAD.items():
        for path, value in settings.items():
            if path == name or path.endswith(f".{name}"):
                why = f"{path} is {value!r}, which {does}; their names do not stand there."
                raise refused(program, why, _NAME_THEM)


_NAME_THEM = "Name the blocks in a policy file, or write `gradient_checkpointing: true` where all layers are meant."


def not_read(settings: Iterable[str], names: Iterable[str], prefix: str = "") -> tuple[str, ...]:
    """A sentence for each of `settings` that is none of `names`."""
    return tuple(f"{prefix}{name} is not read." for name in sorted(set(settings) - set(names)))


def whole(fqns: Iterable[str]) -> tuple[Unit, ...]:
    return tuple(Unit(blocks=(fqn,)) for fqn in fqns)


def refused(written_for: str, why: str, hint: str = "") -> InvalidPolicy:
    return InvalidPolicy(
        f"These settings of {written_for} cannot be said as a policy: {why}",
        hint=hint or "Choose blocks on the page, or name them in a policy file.",
    )


def layer_lists(graph: ModelGraph) -> dict[str, Fqns]:
    """Lists of layers by the name of their parent. A layer is a numbered block with children, inside no other layer."""
    lists: dict[str, Fqns] = {}
    for block in graph.blocks:
        numbered = block.name.isdecimal() and block.n_calls and graph.children[block.fqn]
        if numbered and not any(name.rpartition(".")[2].isdecimal() for name in above(block.fqn)):
            holder = block.fqn.rpartition(".")[0]
            lists[holder] = (*lists.get(holder, ()), block.fqn)
    return lists


def longest_list(graph: ModelGraph) -> tuple[str, Fqns]:
    """The parent and the layers of the model's main list. Raises CannotSay if no block is numbered."""
    lists = layer_lists(graph)
    if not lists:
        raise CannotSay(f"{graph.model.target} has no numbered layers.")
    holder = max(lists, key=lambda parent: (parent.endswith("layers"), len(lists[parent])))
    return holder, lists[holder]


def within(graph: ModelGraph, layers: Fqns, names: Collection[str]) -> Fqns:
    """Blocks inside `layers` whose own name is one of `names`."""
    holders, called = set(layers), [block for block in graph.blocks if block.n_calls and block.name in names]
    return tuple(block.fqn for block in called if not holders.isdisjoint(lineage(block.fqn)))
