"""The base of all records: frozen, keyword-only, strict about unknown fields, and the same document everywhere.

A record that crosses the pipe to the worker is byte for byte the one that is stored on disk. Long series are
`array('q')` columns: raw bytes in msgpack (little-endian machines), plain lists in JSON, and numpy arrays without a
copy for charts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, dataclass_transform, get_args, get_type_hints

import msgspec
from msgspec import Meta

from explorer.errors import BadInput, UnreadableFile, message_of

Origin = Literal["measured", "counted", "predicted", "simulated", "recorded"]
"""The origin of a figure: a clock or an allocator, a count, a model of the machine, a simulation, or the loop of a
user."""

if TYPE_CHECKING:
    Column = array[int]
else:
    Column = array  # subscriptable from Python 3.12 on
"""int64 column, typecode 'q'."""

MOST = 2**53 - 1
"""Largest whole number that a browser holds exactly."""
MOST_RANKS = 2**16
Count = Annotated[int, Meta(ge=0, le=2**62)]
"""Bytes, calls, FLOPs, elements."""
Number = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Milliseconds, ratios: neither infinite nor NaN."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Base of every record. No tensor, no module, no figure inside."""


T = TypeVar("T")


def limits(kind: type[Record], name: str) -> tuple[Any, Any]:
    """Least and largest value of a field, from its type: what command line, page, link, file and worker hold to."""
    hint = get_type_hints(kind, include_extras=True)[name]
    meta = next(part.__metadata__[0] for part in (hint, *get_args(hint)) if hasattr(part, "__metadata__"))
    return meta.ge, meta.le


def column(values: Iterable[int] = ()) -> Column:
    """An int64 column of `values`."""
    return array("q", values)


def to_msgpack(record: object) -> bytes:
    """The compact form: pipe and disk. Raises BadInput where a name or message cannot be written."""
    try:
        return msgspec.msgpack.encode(record, enc_hook=_column_to_bytes)
    except UnicodeEncodeError as error:
        text = ascii(error.object[max(0, error.start - 20) : error.end + 20])
        raise BadInput(
            f"The text {text} cannot be written: it holds half of a letter (a lone surrogate).",
            hint="Name what is called so in whole letters.",
        ) from error


def from_msgpack(data: bytes | bytearray, kind: type[T]) -> T:
    """Reads what `to_msgpack` wrote. Raises UnreadableFile that names the field at fault."""
    return _read(msgspec.msgpack.decode, data, kind)


def to_json(record: object) -> bytes:
    """The readable form: `--json`."""
    return msgspec.json.encode(record, enc_hook=_column_to_list)


def from_json(data: bytes | bytearray | str, kind: type[T]) -> T:
    """Reads what `to_json` wrote. Raises UnreadableFile that names the field at fault."""
    return _read(msgspec.json.decode, data, kind)


def to_plain(record: object) -> Any:
    """Dictionaries, lists, numbers and strings: for YAML and for session state."""
    return msgspec.to_builtins(record, enc_hook=_column_to_list)


def from_plain(plain: object, kind: type[T]) -> T:
    """Reads what `to_plain` gave, strictly. Raises UnreadableFile that names the field at fault."""
    return _read(msgspec.convert, plain, kind)


def _read(decode: Callable[..., T], document: object, kind: type[T]) -> T:
    try:
        return decode(document, type=kind, dec_hook=_to_column)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"This is not a {kind_name(kind)}: {message_of(error)}.") from error


def kind_name(kind: object) -> str:
    """The record's name as it stands in messages."""
    return getattr(kind, "__name__", str(kind))


def _column_to_bytes(value: object) -> object:
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} does not belong in a record")


def _column_to_list(value: object) -> object:
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} does not belong in a record")


def _to_column(kind: type, value: Any) -> object:
    """A column, the only kind of value that msgspec does not know: from bytes (msgpack) or numbers (JSON)."""
    if isinstance(value, bytes) and len(value) % 8:
        raise ValueError(f"a column of int64 has {len(value)} bytes")
    return array("q", value)
