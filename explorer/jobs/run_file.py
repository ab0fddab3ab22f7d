"""A run as a single file, for another machine, and the files of a training's ranks as one run.

Damaged, foreign and newer files raise different errors. `step2.explorer` opens `step2.rank0.explorer` and the rest.

magic | version u16 | sha256 of all that follows and of the version | length u64 | zlib of msgpack(StoredRecord)
"""

from __future__ import annotations

import hashlib
import re
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Raw
from msgspec.structs import replace

from explorer import slices
from explorer.errors import BadInput, NotSaved, UnreadableFile
from explorer.record.base import Record, from_msgpack, to_msgpack
from explorer.record.bounded_file import read_file, read_start, unpack
from explorer.record.comparison import Comparison
from explorer.record.files import RUN_MAGIC as MAGIC
from explorer.record.graph import RECORDED, ModelGraph, ModelRef
from explorer.record.history import MemoryHistory
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.record.sound import unsound

KINDS: dict[str, type[Record]] = {
    "measurement": Measurement,
    "comparison": Comparison,
    "recorded ranks": RecordedRanks,
    "memory history": MemoryHistory,
}
for part in slices.parts("jobs").values():
    KINDS |= part.KINDS
"""Kinds of record that the store keeps, by the name in the list of runs."""

LATEST = 253_000_000_000.0
"""Last date that can be shown, in seconds since 1970: in the year 9987."""
VERSION = 1
_VERSION = struct.Struct("<H")
_LENGTH = struct.Struct("<Q")
_DIGEST_SIZE = hashlib.sha256().digest_size
_HEAD_SIZE = len(MAGIC) + _VERSION.size + _DIGEST_SIZE + _LENGTH.size
_LARGEST_BYTES = 256 * 1024**2
"""Bytes of a run file at most, packed and unpacked."""
_LARGEST_OUTSIDE_COLUMNS = 16 * 1024**2
"""Bytes of a record outside of its columns: one byte of a column takes one byte of memory, one byte elsewhere up to
32 (a small number in a list of times)."""
_SMALL_BYTES = 16 * 1024
"""A part of a document that is no larger counts as a whole."""
_COLUMN_HEADS = (0xC4, 0xC5, 0xC6)
_MAP_HEADS = (*range(0x80, 0x90), 0xDE, 0xDF)
"""First bytes of binary data and of maps in msgpack."""
_MOST_PARTS = Meta(max_length=4096)
_MAP = msgspec.msgpack.Decoder(Annotated[dict[str, Raw], _MOST_PARTS])
_LIST = msgspec.msgpack.Decoder(Annotated[list[Raw], _MOST_PARTS])


class StoredRecord(Record):
    """A record with its kind and name, as the store and the file hold it."""

    kind: str
    name: str
    created: Annotated[float, Meta(ge=0, le=LATEST)]
    record: bytes
    """msgpack of KINDS[kind]."""


def stored_record(record: Record, name: str = "", encoded: bytes | None = None) -> StoredRecord:
    """`record` made ready to be kept, now. The caller checked `is_kept`; `encoded` is its msgpack, where at hand."""
    encoded = to_msgpack(record) if encoded is None else encoded
    return StoredRecord(kind=kind_of(record), name=name or name_of(record), created=time.time(), record=encoded)


def is_kept(record: Record) -> bool:
    """Whether the store has a kind for it: runs yes, descriptions and drawings no."""
    return type(record) in KINDS.values()


def kind_of(record: Record) -> str:
    """The name of the record's kind; the caller checked `is_kept`."""
    return next(kind for kind, type_ in KINDS.items() if type_ is type(record))


def model_of(record: Record) -> str:
    """Target of the model that ran; empty if the record names no model."""
    spec = spec_of(record)
    model = getattr(record, "model", None) if spec is None else spec.model
    return model.target if isinstance(model, ModelRef) else ""


def name_of(record: Record) -> str:
    """The name of a run without a given name: `gpt small cpu, recompute 6`."""
    spec = spec_of(record)
    if spec is None:
        return model_of(record) or kind_of(record)
    if spec.model.is_recorded:
        return f"{spec.model.target.removeprefix(RECORDED)} {spec.device}, recorded"
    stem = spec.model.target.rpartition("/")[2].replace(".py", "")
    what = " ".join(filter(None, (stem, spec.model.size, spec.device)))
    return f"{what}, {'forward alone' if spec.forward_only else _in_words(spec.policy)}"


def spec_of(record: Record) -> RunSpec | None:
    """The spec behind a record: of the candidate in a comparison."""
    run = getattr(record, "candidate", record)
    spec = getattr(run, "spec", None)
    return spec if isinstance(spec, RunSpec) else None


def graph_of(record: Record) -> ModelGraph | None:
    """The graph that a run brings with it; None: it has none."""
    graph = getattr(getattr(record, "candidate", record), "graph", None)
    return graph if isinstance(graph, ModelGraph) else None


def with_graph(record: Record, graph: ModelGraph | None) -> Record:
    """`record` with the graph of its model, if records of its kind hold a graph."""
    if isinstance(record, Comparison):
        return replace(record, candidate=with_graph(record.candidate, graph))
    return replace(record, graph=graph) if graph and is_kept(record) and hasattr(record, "graph") else record


def write(stored: StoredRecord) -> bytes:
    """The file."""
    body = zlib.compress(to_msgpack(stored), 6)
    version, length = _VERSION.pack(VERSION), _LENGTH.pack(len(body))
    return MAGIC + version + _digest(version, length, body) + length + body


def read_path(path: Path) -> bytes:
    """The bytes of a run file. Raises UnreadableFile for what is no regular file or larger than a run file can be."""
    return read_file(path, _LARGEST_BYTES, hint="Export it again where it ran.")


def write_file(path: Path, data: bytes) -> Path:
    """Writes a whole file or nothing: a full disk leaves the old file. Raises NotSaved with the system's reason."""
    ordinary = path.is_file() or not path.exists()  # neither /dev/stdout nor a pipe
    part = path.with_name(f"{path.name}.part") if ordinary else path
    try:
        part.write_bytes(data)
        if ordinary:
            part.replace(path)
    except OSError as error:
        if ordinary:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        raise NotSaved(f"{path} could not be written: {error.strerror}.", hint="Give another path.") from error
    return path


def read(data: bytes) -> StoredRecord:
    """Raises UnreadableFile that says which: foreign, too new, cut short, damaged."""
    if data[: len(MAGIC)] != MAGIC:
        raise UnreadableFile(
            "This is not a run file of Checkpoint Explorer.",
            hint="Run files are exported on the Runs page or by --save.",
        )
    if len(data) < _HEAD_SIZE:
        raise UnreadableFile(f"The run file is cut short: it has {len(data)} bytes.", hint="Export or copy it again.")
    at = len(MAGIC)
    version = data[at : at + _VERSION.size]
    at += _VERSION.size
    digest = data[at : at + _DIGEST_SIZE]
    at += _DIGEST_SIZE
    length, body = data[at : at + _LENGTH.size], data[at + _LENGTH.size :]
    (found_version,), (n_bytes,) = _VERSION.unpack(version), _LENGTH.unpack(length)
    if found_version > VERSION and _digest(version, length, body) == digest:
        raise UnreadableFile(
            f"The run file has version {found_version}; this release reads version {VERSION}.",
            hint="Update Checkpoint Explorer.",
        )
    if len(body) < n_bytes:
        raise UnreadableFile(
            f"The run file is cut short: it has {len(body)} of {n_bytes} bytes.", hint="Export or copy it again."
        )
    if _digest(version, length, body) != digest:
        raise UnreadableFile("The run file is damaged: its checksum does not match.", hint="Export or copy it again.")
    stored = from_msgpack(unpack(body, _LARGEST_BYTES, "The run file"), StoredRecord)
    if stored.kind not in KINDS:
        raise UnreadableFile(
            f"The run file holds a {stored.kind[:40]}; this release reads {', '.join(KINDS)}.",
            hint="Update Checkpoint Explorer.",
        )
    n_outside = _bytes_outside_columns(Raw(stored.record))
    if n_outside > _LARGEST_OUTSIDE_COLUMNS:
        raise UnreadableFile(
            f"The run file holds {n_outside:,} bytes outside of its columns; "
            f"at most {_LARGEST_OUTSIDE_COLUMNS:,} are read.",
            hint="Export it again where it ran.",
        )
    if fault := unsound(from_msgpack(stored.record, KINDS[stored.kind])):
        raise UnreadableFile(
            f"The run file does not hold a run that can have happened: {fault}.", hint="Export it again where it ran."
        )
    return stored


def _bytes_outside_columns(document: Raw) -> int:
    """Bytes of a msgpack document that are no column; no value of them is built."""
    view = memoryview(document)
    if view.nbytes < _SMALL_BYTES:
        return view.nbytes
    if view[0] in _COLUMN_HEADS:
        return 0
    try:
        parts = _MAP.decode(view).values() if view[0] in _MAP_HEADS else _LIST.decode(view)
    except msgspec.DecodeError:  # a text, or a container of very many parts
        return view.nbytes
    return sum(map(_bytes_outside_columns, parts))


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def _in_words(policy: Policy) -> str:
    """By the blocks that it names, as the page and the command line count them."""
    n_offload = sum(len(unit.blocks) for unit in policy.units if unit.action == "offload")
    counted = {"recompute": len(policy.blocks) - n_offload, "offload": n_offload}
    return ", ".join(f"{what} {n}" for what, n in counted.items() if n) or "keep all"


def step_in(name: str) -> Measurement | None:
    """The step in a run file, of ranks the fullest, of a comparison the baseline; None if `name` is no run file.

    Raises UnreadableFile, and BadInput for a run without a step that a forecast can begin from.
    """
    path = Path(name)
    files = [path] if path.is_file() else files_of_ranks(path)
    if not files:
        return None
    if read_start(files[0], len(MAGIC)) != MAGIC:
        return None
    stored = open_files([read_path(file) for file in files])
    record = _run_of(stored)
    graph = graph_of(record)
    step = getattr(record, "baseline", getattr(record, "fullest", record))
    if not isinstance(step, Measurement) or (step.graph is None and graph is None):
        raise BadInput(f"{name} holds a {stored.kind} without a model's graph.", hint="Record or measure a step again.")
    return replace(step, graph=step.graph or graph)


def files_of_ranks(path: Path) -> list[Path]:
    """Files that ranks wrote beside `path` under its name, by rank; may be empty."""
    path_of_rank = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(path.suffix)}")
    if not path.parent.is_dir():
        return []
    by_rank = {int(match[1]): file for file in path.parent.iterdir() if (match := path_of_rank.fullmatch(file.name))}
    return [by_rank[rank] for rank in sorted(by_rank)]


def grouped(files: Sequence[bytes]) -> list[StoredRecord]:
    """Records of files chosen together. Files of the ranks of a step become one run; any other file is a run.

    Raises UnreadableFile, BadInput.
    """
    groups: dict[str, list[StoredRecord]] = {}
    for i, data in enumerate(files):
        stored = read(data)
        run = _run_of(stored)
        group = str(i)
        if isinstance(run, Measurement) and run.rank is not None:
            group = f"{_place(run)} of {run.n_ranks}"
        groups.setdefault(group, []).append(stored)
    return [_as_one(group) for group in groups.values()]


def open_files(files: Sequence[bytes]) -> StoredRecord:
    """The record of one file, or the files of a step's ranks joined into one run. Raises UnreadableFile, BadInput."""
    return _as_one([read(data) for data in files])


def _as_one(stored: Sequence[StoredRecord]) -> StoredRecord:
    if len(stored) == 1:
        return stored[0]
    runs = [_run_of(file) for file in stored]
    alone = [file.name for file, run in zip(stored, runs) if not isinstance(run, Measurement) or run.rank is None]
    if alone:
        raise BadInput(
            f"{len(stored)} files are opened as the ranks of one step, and {', '.join(alone)} was recorded by none.",
            hint="Open such a file by itself.",
        )
    merged = _side_by_side([run for run in runs if isinstance(run, Measurement)])
    name = f"{merged.recorded_in}, {len(merged.ranks)} of {merged.n_ranks} ranks"
    return replace(stored_record(merged, name), created=max(file.created for file in stored))


def _run_of(stored: StoredRecord) -> Record:
    return from_msgpack(stored.record, KINDS[stored.kind])


def _side_by_side(runs: Sequence[Measurement]) -> RecordedRanks:
    """Raises BadInput with everything that shows that they are not ranks of one step."""
    runs = sorted(runs, key=lambda run: run.rank or 0)
    ranks = [run.rank for run in runs]
    sizes = sorted({run.n_ranks or 0 for run in runs})
    places = list(dict.fromkeys(_place(run) for run in runs))
    faults = [f"rank {rank} is there twice" for rank in sorted({r or 0 for r in ranks if ranks.count(r) > 1})]
    if len(sizes) > 1:
        faults.append(f"they are of trainings with {' and '.join(map(str, sizes))} ranks")
    if len(places) > 1:
        faults.append(f"they were recorded in {' and in '.join(places)}")
    if faults:
        raise BadInput(
            f"{len(runs)} files are opened as the ranks of one step; {'; '.join(faults)}.",
            hint="Take the files that one step of one training left; delete those of an earlier one.",
        )
    return RecordedRanks(ranks=tuple(runs), n_ranks=sizes[0], recorded_in=places[0])


def _place(run: Measurement) -> str:
    return run.recorded_in.removesuffix(f", rank {run.rank}")
