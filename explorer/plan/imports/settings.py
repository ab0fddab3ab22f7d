"""Settings of a training program as a flat table, from whatever people have: YAML, JSON, TOML, flags, a call in Python.

`--activation_checkpoint.mode=full`, `[activation_checkpoint]` with `mode = "full"`, and the same nested in YAML are all
`{"activation_checkpoint.mode": "full"}`. Nothing is executed; a text that is none of these gives an empty table.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from explorer.errors import BadInput, UnreadableFile
from explorer.plan.policy.strict_yaml import Document

Settings = Mapping[str, Any]
"""Dotted path and value; dashes are underscores, and what is null is left out."""

_MOST_CHARACTERS = 50_000
"""Of a text in another form than YAML and JSON."""


def settings_of(text: str, plain: Any) -> Settings:
    """The table of `text`; `plain` is what it says as YAML, None where it is none.

    Raises UnreadableFile where one path is given two values, and for a shell script with flags.
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
"""Or a subcommand of torchtitan: `activation_checkpoint:full`."""


def last(path: str) -> str:
    return path.rpartition(".")[2]


def _one_each(pairs: list[tuple[str, Any]]) -> Settings:
    table: dict[str, Any] = {}
    for path, value in pairs:
        if value is None:
            continue
        if table.setdefault(path, value) != value:
            raise UnreadableFile(f"{path} is given twice: {table[path]} and {value}.", hint="Leave out one of the two.")
    return table


def _toml(text: str) -> Iterator[tuple[str, Any]]:
    try:
        plain = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return
    yield from _flat(plain)


def _nested(plain: Any) -> Iterator[tuple[str, Any]]:
    """YAML or JSON. Many a line of flags or of Python is YAML too, with a key that is no name."""
    if isinstance(plain, dict) and all(_NAME.fullmatch(key) for key in plain):
        yield from _flat(plain)


def _call(text: str) -> Iterator[tuple[str, Any]]:
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


def _literal(name: str, values: list[ast.expr]) -> Iterator[tuple[str, Any]]:
    """What is computed is not known here."""
    for value in values:
        with suppress(ValueError):
            yield from _flat({name: ast.literal_eval(value)})


def _flags(text: str) -> Iterator[tuple[str, Any]]:
    """`--recompute-num-layers 4`, `--fp16`, `--activation_checkpoint.mode=full`, `activation_checkpoint:full`.

    Nothing stands before the first flag: that would be a command, and a shell's variables are not known here.
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
            yield from _flat({name: _given(values)})
        name, values = "", []
        if not token.startswith("--"):
            yield "activation_checkpoint.mode", token.partition(":")[2].replace("-", "_")
        else:
            name, equals, value = token.removeprefix("--").partition("=")
            values = [value] if equals else []


def _given(values: list[str]) -> Any:
    if not values:
        return True
    return _value(values[0]) if len(values) == 1 else [_value(value) for value in values]


def _value(text: str) -> Any:
    """As YAML reads it: `2`, `true`, `{"use_reentrant": false}`; text where it is no YAML."""
    try:
        return Document(text).plain
    except BadInput:
        return text


def _flat(plain: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        path = f"{above}{str(key).removeprefix('--')}".replace("-", "_")
        given = _value(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
        if isinstance(given, Mapping):
            yield from _flat(given, f"{path}.")
        else:
            yield path, given
