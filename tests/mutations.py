"""One field of a record changed at a time, to values that its type allows: from the types, so that every field is."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

from explorer.record.base import Record
from explorer.record.base import to_plain as _to_plain

INTEGERS = (-1, 0, 1, 7, 1000, 2**31, 2**53 - 1, 2**62)
FLOATS = (-1.0, 0.0, 1e-300, 1.0, 1e12, 1e300, float("inf"), float("nan"))
TEXTS = ("", " ", "<b>x</b><br>", "a.b", "%{x}", "x" * 3000, "\x00\u202e\n", "blocks.0", "é{}[]$&")
Place = tuple[tuple[str | int, ...], inspect.Type]


def to_plain(value: Any) -> Any:
    """Of dictionaries and lists alone, which can be changed."""
    value = _to_plain(value) if isinstance(value, Record) else value
    if isinstance(value, dict):
        return {key: to_plain(one) for key, one in value.items()}
    return [to_plain(one) for one in value] if isinstance(value, list | tuple) else value


def places(record: Record) -> list[Place]:
    """Every field of the record with its type; of a sequence the first and the last element."""
    return list(_within(inspect.type_info(type(record)), to_plain(record), ()))


def _within(kind: inspect.Type, value: Any, path: tuple[str | int, ...]) -> Iterator[Place]:
    if path:
        yield path, kind
    match kind:
        case inspect.UnionType(types=types) if value is not None:
            some = [one for one in types if not isinstance(one, inspect.NoneType)]
            if len(some) == 1:
                yield from _within(some[0], value, path)
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from _within(field.type, value[field.encode_name], (*path, field.encode_name))
        case inspect.VarTupleType(item_type=item):
            for i in sorted({0, len(value) - 1} & set(range(len(value)))):
                yield from _within(item, value[i], (*path, i))
        case inspect.DictType(value_type=item):
            for key in list(value)[:1]:
                yield from _within(item, value[key], (*path, key))


def values(kind: inspect.Type, value: Any) -> list[Any]:
    """What may stand there instead of `value`, by its type alone."""
    match kind:
        case inspect.IntType():
            return [*INTEGERS]
        case inspect.FloatType():
            return [*FLOATS]
        case inspect.BoolType():
            return [not value]
        case inspect.StrType():
            return [*TEXTS]
        case inspect.LiteralType(values=some):
            return list(some)
        case inspect.UnionType(types=types):
            return [one for kind in types for one in values(kind, value)]
        case inspect.NoneType():
            return [None]
        case inspect.VarTupleType():
            return [] if value is None else [[], value[:1], [*value, *value], value[::-1], value * 40]
        case inspect.DictType():
            return [{}]
        case inspect.CustomType(cls=cls) if cls is array:
            ends = [] if not value else [[*value[:-1], end] for end in (-1, 0, 2**40, 2**62)]
            return [[], list(value or ())[:-1], *ends]
    return []


def changed(record: Record, path: tuple[str | int, ...], value: Any) -> Any:
    """The plain document of `record` with `value` at `path`."""
    document = to_plain(record)
    inside = document
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    return document


def at(record: Record, path: tuple[str | int, ...]) -> Any:
    """What stands at `path`, plain."""
    inside = to_plain(record)
    for step in path:
        inside = inside[step]
    return inside
