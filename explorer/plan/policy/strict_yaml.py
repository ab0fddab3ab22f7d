"""YAML for a file that strangers send: no tags, no aliases, no doubled keys, no depth, and a line for every fault.

The text is parsed once, by libyaml where PyYAML has it, and read event by event: nothing is built before it is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from explorer.errors import UnreadableFile, message_of

LARGEST_BYTES = 1024**2
_DEEPEST = 16
MOST_VALUES = 30_000
"""A file of the largest size that has no more is read in less than a second."""
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SCALARS: Any = yaml.SafeLoader("")
"""Knows which text is a number, a truth or nothing."""
_TYPES = tuple(f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null"))

Path = tuple[str | int, ...]
"""Keys and indices from the top of the document."""


class Document:
    """A parsed document: `plain` values, and the line on which each of them stands."""

    def __init__(self, text: str) -> None:
        """Raises UnreadableFile with the line at fault."""
        if len(text.encode(errors="surrogatepass")) > LARGEST_BYTES:
            raise UnreadableFile(f"The file has more than {LARGEST_BYTES} bytes; a policy file is far smaller.")
        self._lines: dict[Path, int] = {}
        self.plain: object = None
        try:
            self._events = yaml.parse(text, Loader=_PARSER)
            n_documents = 0
            for event in self._events:
                if isinstance(event, yaml.DocumentStartEvent):
                    n_documents += 1
                    if n_documents > 1:
                        raise UnreadableFile(f"This is not YAML: line {_line(event)}: a second document begins.")
                    self.plain = self._read(next(self._events), ())
        except yaml.MarkedYAMLError as error:
            where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
            raise UnreadableFile(f"This is not YAML: {where}{error.problem}.") from error
        except (yaml.YAMLError, ValueError) as error:  # a control character, half of a letter, an endless number
            raise UnreadableFile(f"This is not YAML: {message_of(error)}.") from error

    def line(self, path: Path) -> int:
        """Line of the value at `path`, or of the nearest thing above it that the file holds."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def _read(self, event: yaml.Event, path: Path) -> object:
        """The value that begins with `event`.

        Aliases could grow without end, depth could exhaust the stack, tags name types.
        """
        line = _line(event)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise UnreadableFile(f"line {line}: anchors and aliases (& and *) do not belong in a policy file.")
        if tag := getattr(event, "tag", None):
            raise UnreadableFile(f"line {line}: the tag {tag} does not belong in a policy file.")
        if len(self._lines) >= MOST_VALUES:
            raise UnreadableFile(f"line {line}: more than {MOST_VALUES} values; a policy file has far fewer.")
        self._lines.setdefault(path, line)
        if isinstance(event, yaml.ScalarEvent):
            return _value(event)
        if len(path) >= _DEEPEST:
            raise UnreadableFile(f"line {line}: more than {_DEEPEST} levels deep.")
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._read(child, (*path, i)) for i, child in enumerate(self._until(yaml.SequenceEndEvent))]
        return self._mapping(path)

    def _mapping(self, path: Path) -> dict[str, object]:
        plain: dict[str, object] = {}
        for event in self._until(yaml.MappingEndEvent):
            line, key = _line(event), self._read(event, (*path, ""))
            if not isinstance(key, str):
                raise UnreadableFile(f"line {line}: a field name must be text; put it in quotes.")
            if key in plain:
                raise UnreadableFile(f"line {line}: the field {key} is there twice.")
            self._lines[*path, key] = line
            plain[key] = self._read(next(self._events), (*path, key))
        self._lines.pop((*path, ""), None)
        return plain

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        while not isinstance(event := next(self._events), end):
            yield event


def _value(event: yaml.ScalarEvent) -> object:
    """By YAML's own rules; of another type than number, text, truth or nothing, its text."""
    tag = _SCALARS.resolve(yaml.ScalarNode, event.value, event.implicit)
    return _SCALARS.construct_object(yaml.ScalarNode(tag, event.value)) if tag in _TYPES else event.value


def _line(event: yaml.Event) -> int:
    """Counted from 1."""
    return event.start_mark.line + 1 if event.start_mark else 1
