"""YAML for a file that strangers send: no tags, no aliases, no doubled keys, no depth, and a line for every fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from explorer.errors import UnreadableFile, message_of

LARGEST_BYTES = 1024**2
_DEEPEST = 16

Path = tuple[str | int, ...]
"""Keys and indices from the top of the document."""


class Document:
    """A parsed document: `plain` values, and the line on which each of them stands."""

    def __init__(self, text: str) -> None:
        """Raises UnreadableFile with the line at fault."""
        if len(text.encode(errors="surrogatepass")) > LARGEST_BYTES:
            raise UnreadableFile(f"The file has more than {LARGEST_BYTES} bytes; a policy file is far smaller.")
        self._lines: dict[Path, int] = {}
        try:
            _refuse_tricks(text)
            self._loader = yaml.SafeLoader(text)
            root = self._loader.get_single_node()
            self.plain: Any = None if root is None else self._read(root, ())
        except yaml.MarkedYAMLError as error:
            where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
            raise UnreadableFile(f"This is not YAML: {where}{error.problem}.") from error
        except (yaml.YAMLError, ValueError) as error:  # a control character, or a date that no calendar has
            raise UnreadableFile(f"This is not YAML: {message_of(error)}.") from error

    def line(self, path: Path) -> int:
        """Line of the value at `path`, or of the nearest thing above it that the file holds."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def _read(self, node: yaml.Node, path: Path) -> Any:
        self._lines.setdefault(path, _line(node))
        if isinstance(node, yaml.SequenceNode):
            return [self._read(child, (*path, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, path))
        return self._scalar(node)

    def _pairs(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for key_node, value_node in node.value:
            line = _line(key_node)
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise UnreadableFile(f"line {line}: a field name must be text; put it in quotes.")
            if key in seen:
                raise UnreadableFile(f"line {line}: the field {key} is there twice.")
            seen.add(key)
            self._lines[(*path, key)] = line
            yield key, self._read(value_node, (*path, key))

    def _scalar(self, node: yaml.Node) -> Any:
        """The value by YAML's own rules; of another type than number, text, truth or nothing, its text."""
        value = self._loader.construct_object(node)
        return value if isinstance(value, bool | int | float | str) or value is None else node.value


def _refuse_tricks(text: str) -> None:
    """Before anything is built: aliases can grow without end, depth can exhaust the stack, tags name types."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = _line(event)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise UnreadableFile(f"line {line}: anchors and aliases (& and *) do not belong in a policy file.")
        if tag := getattr(event, "tag", None):
            raise UnreadableFile(f"line {line}: the tag {tag} does not belong in a policy file.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise UnreadableFile(f"line {line}: more than {_DEEPEST} levels deep.")


def _line(part: yaml.Node | yaml.Event) -> int:
    """Counted from 1."""
    return part.start_mark.line + 1 if part.start_mark else 1
