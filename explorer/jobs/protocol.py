"""What app and worker say to each other: requests down, events up, each a length-prefixed msgpack record.

    client  ── Submit(job, request) ──▶  worker
            ── CancelJob(job) ───────▶
            ◀── Reported(job, progress), then one of Finished / Failed ──
"""

from __future__ import annotations

import struct
from typing import IO, Any

from explorer.errors import UnreadableFile
from explorer.record.base import Record, from_msgpack, to_msgpack
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.measurement import Failure, Measurement
from explorer.record.picture import AutogradPictures
from explorer.record.progress import Progress
from explorer.record.run import RunSpec


class Describe(Record, tag=True):
    """-> ModelGraph"""

    model: ModelRef
    seed: int = 0


class Measure(Record, tag=True):
    """-> Measurement"""

    spec: RunSpec


class Compare(Record, tag=True):
    """-> Comparison. Baseline and candidate differ in their policy (and plan) alone."""

    baseline: RunSpec
    candidate: RunSpec
    full: bool = True
    """False leaves out rerun, float64 reference, masks and state audit: gradients and buffers only."""


class DrawAutograd(Record, tag=True):
    """-> AutogradPictures: one block's autograd graph, kept and recomputed."""

    spec: RunSpec
    block: str


Request = Describe | Measure | Compare | DrawAutograd

RESULTS: dict[type[Record], type[Record]] = {
    Describe: ModelGraph,
    Measure: Measurement,
    Compare: Comparison,
    DrawAutograd: AutogradPictures,
}


class Submit(Record, tag=True):
    job: str
    request: Request


class CancelJob(Record, tag=True):
    job: str


class Reported(Record, tag=True):
    job: str
    progress: Progress


class Finished(Record, tag=True):
    job: str
    result: bytes
    """msgpack of the request's result type."""


class Failed(Record, tag=True):
    job: str
    failure: Failure


Command = Submit | CancelJob
Event = Reported | Finished | Failed

_LENGTH = struct.Struct("<Q")


def write_frame(stream: IO[bytes], record: Record) -> None:
    """One record, its length in front, flushed."""
    data = to_msgpack(record)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes], kind: Any) -> Any:
    """The next record, or None at the end of the stream. Raises UnreadableFile on a torn frame."""
    head = stream.read(_LENGTH.size)
    if not head:
        return None
    if len(head) < _LENGTH.size:
        raise UnreadableFile("The other side stopped in the middle of a message.")
    (n_bytes,) = _LENGTH.unpack(head)
    data = stream.read(n_bytes)
    if len(data) < n_bytes:
        raise UnreadableFile("The other side stopped in the middle of a message.")
    return from_msgpack(data, kind)
