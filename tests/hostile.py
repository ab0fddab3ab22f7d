"""Records whose every text names something that leaves a mark if it is loaded, made by walking the fields of their
types: a field that is added to a record is walked too."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import inspect

from explorer.jobs import run_file
from explorer.record.base import Record, from_plain, to_plain
from explorer.record.graph import INPUT, ModelRef

R = TypeVar("R", bound=Record)


class Touch:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@dataclass(frozen=True)
class Trap:
    """Texts in a folder; whoever loads what one of them names leaves `mark`."""

    folder: Path

    @property
    def mark(self) -> Path:
        return self.folder / "mark"

    @property
    def texts(self) -> tuple[str, ...]:
        """A function of the system, a file with and without its factory, pickled weights."""
        code, weights = self.folder / "evil.py", self.folder / "evil.pt"
        code.write_text(f"from pathlib import Path\nPath({str(self.mark)!r}).touch()\nfactory = None\n")
        weights.write_bytes(pickle.dumps(Touch(self.mark)))
        return "os:system", f"{code}:factory", str(code), str(weights)

    def filled(self, kind: type[R], text: str) -> R:
        """A record of this type with every field there and `text` in every free string."""
        return from_plain(self._built(inspect.type_info(kind), text), kind)

    def changed(self, record: R, text: str) -> R:
        """`record` with `text` in every free string, and as the name of every model that it has. Names of blocks stay
        where the record has a graph: its parts have to fit together."""
        graph = run_file.graph_of(record)
        names = {""} if graph is None else {INPUT, *graph.by_fqn, *(join.id for join in graph.joins)}
        plain = self._walked(
            inspect.type_info(type(record)), to_plain(record), lambda own: own if own in names else text
        )
        return from_plain(plain, type(record))

    def _built(self, kind: inspect.Type, text: str) -> Any:
        match kind:
            case inspect.StrType():
                return text
            case inspect.StructType(cls=cls) if cls is ModelRef:
                return self._model(text)
            case inspect.StructType(fields=fields):
                return {field.encode_name: self._built(field.type, text) for field in fields}
            case inspect.UnionType(types=types):
                return self._built(next(one for one in types if not isinstance(one, inspect.NoneType)), text)
            case inspect.VarTupleType(item_type=item):
                return [self._built(item, text)]
            case inspect.DictType(key_type=key, value_type=value):
                return {self._built(key, text): self._built(value, text)}
            case inspect.LiteralType(values=values):
                return values[0]
            case inspect.CustomType(cls=cls) if cls is array:
                return []
            case inspect.BoolType():
                return True
            case inspect.IntType(ge=least) | inspect.FloatType(ge=least):
                return max(1, least or 1)
        raise NotImplementedError(f"records have no {kind} yet")

    def _walked(self, kind: inspect.Type, value: Any, text: Callable[[str | None], str]) -> Any:
        match kind:
            case inspect.StrType():
                return text(value)
            case inspect.StructType(cls=cls) if cls is ModelRef:
                return self._model(text(None))
            case inspect.StructType(fields=fields):
                return {field.encode_name: self._walked(field.type, value[field.encode_name], text) for field in fields}
            case inspect.UnionType(types=types) if value is not None:
                some = [one for one in types if not isinstance(one, inspect.NoneType)]
                return self._walked(some[0], value, text) if len(some) == 1 else value
            case inspect.VarTupleType(item_type=item):
                return [self._walked(item, one, text) for one in value]
            case inspect.DictType(value_type=item):
                return {key: self._walked(item, one, text) for key, one in value.items()}
        return value

    def _model(self, text: str) -> dict[str, Any]:
        command = {"command": f"touch {self.mark}"} if text == "os:system" else {}
        weights = str(self.folder / "evil.pt")
        return {"target": text, "size": None, "arguments": command, "weights": weights}
