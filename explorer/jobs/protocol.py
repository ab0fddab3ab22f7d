"""Requests to the worker with the kinds of their results, and the events by which the process of a job answers.

app  ── Submit(request) ──▶  process of the job
     ◀── Reported(progress) ..., then one of Finished / Failed ── each a length-prefixed msgpack record
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Union

from explorer import slices
from explorer.errors import TimedOut, UnreadableFile
from explorer.jobs.on_card import CardCount, CountOnCard
from explorer.jobs.rows import RequestRow
from explorer.record.base import Count, Record, from_msgpack, to_msgpack
from explorer.record.comparison import Comparison
from explorer.record.failure import Failure
from explorer.record.fit import Fit
from explorer.record.graph import IN_TRAINING, AutogradPictures, Conditions, ModelGraph, ModelRef
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.plan import Front, Progress, Wish
from explorer.record.run import Device, RunSpec


class Describe(Record, tag=True):
    """-> ModelGraph"""

    model: ModelRef
    seed: int = 0
    device: Device = "cpu"
    without_data: bool = False
    """No memory for its parameters: a model of any size can be described."""
    n_ranks: Count = 1
    """More than one: in a process group of so many, of which no other rank exists. The model may call it."""
    conditions: Conditions = IN_TRAINING


class Measure(Record, tag=True):
    """-> Measurement"""

    spec: RunSpec
    until_it_fits: bool = False
    """If memory is refused, the step runs again under policies that need less and less memory."""
    beside_keep_all: bool = False
    """The timed steps alternate with steps that keep everything, see `Times.beside`."""
    with_graph: bool = False
    """With `until_it_fits`: the model is described first; the first part of the result has its graph alone."""
    without_data: bool = False
    """Predicted instead of measured: nothing of the model is allocated, no kernel runs."""
    own_optimizer: str = ""
    """With `without_data`: `file.py:Class`, which makes the optimizer of the parameters. Empty: that of the spec."""


class MeasureRanks(Record, tag=True):
    """-> RecordedRanks: the step of `spec` on its ranks."""

    spec: RunSpec
    without_data: bool = False
    """Predicted for any number of ranks; else the ranks are processes of this machine."""


class Compare(Record, tag=True):
    """-> Comparison. Baseline and candidate differ in their policy (and plan) alone, or the candidate has ranks."""

    baseline: RunSpec
    candidate: RunSpec
    full: bool = True
    """False leaves out rerun, float64 reference, masks and state audit: gradients and buffers only."""


class FindFit(Record, tag=True):
    """-> Fit: what would make the step of `spec` fit its card or its budget, each lever played and judged."""

    spec: RunSpec
    budget: str | int | None = None


class DrawAutograd(Record, tag=True):
    """-> AutogradPictures: one block's autograd graph, kept and recomputed."""

    spec: RunSpec
    block: str


class FindPlans(Record, tag=True):
    """-> Front: plans for a measured step: the plan for `wish`, or all plans of the front."""

    run: Measurement
    graph: ModelGraph
    wish: Wish = Wish()


ROWS: dict[type[Record], RequestRow] = {
    Describe: RequestRow("describe", ModelGraph, ("explore", "pipeline"), "Reading the model"),
    Measure: RequestRow("measure", Measurement, ("explore",), "Measuring the baseline"),
    MeasureRanks: RequestRow("measure_ranks", RecordedRanks, ("explore",), "Playing the ranks"),
    Compare: RequestRow("compare", Comparison, ("explore",), "Running baseline and candidate"),
    FindFit: RequestRow("find_fit", Fit, ("explore",), "Playing levers"),
    CountOnCard: RequestRow("count_on_card", CardCount, ("explore",), "Counting on an imaginary card"),
    DrawAutograd: RequestRow("draw_autograd", AutogradPictures, ("explore",), "Drawing the autograd graph"),
    FindPlans: RequestRow("find_plans", Front, ()),
}
for part in slices.parts("jobs").values():
    ROWS |= part.ROWS

if TYPE_CHECKING:
    Request = Record
else:
    Request = Union[tuple(ROWS)]  # noqa: UP007 (slices add to it)


DESCRIBE_LIMIT_S = 600.0
"""Time limit of requests without a RunSpec, such as Describe."""


def specs_of(request: Request) -> list[RunSpec]:
    """Run specifications among the fields of a request."""
    fields = (getattr(request, name) for name in request.__struct_fields__)
    return [field for field in fields if isinstance(field, RunSpec)]


def models_of(request: Request) -> list[ModelRef]:
    """Models among the fields of a request, those of its run specifications included."""
    fields = (getattr(request, name) for name in request.__struct_fields__)
    models = (field.model if isinstance(field, RunSpec) else field for field in fields)
    return [model for model in models if isinstance(model, ModelRef)]


def run_key(request: Request) -> bytes:
    """All by which two processes can tell that their requests are equal: the models' files and packages too."""
    files = [Path(model.target.partition(":")[0]).resolve() for model in models_of(request)]
    dates = [(str(file), file.stat().st_mtime_ns if file.exists() else 0) for file in files]
    return to_msgpack(request) + repr((dates, sys.prefix)).encode()


def description_of(request: Request) -> str:
    """`measure sample_models/gpt.py`: the request in words."""
    return " ".join([type(request).__name__.lower(), *(model.target for model in models_of(request)[:1])])


def run_for(request: Request, record: Record) -> Measurement | None:
    """The whole run in `record`, a result of another request, that answers `request`; None without such a run."""
    if not isinstance(request, Measure) or request.without_data or request.beside_keep_all:
        return None
    runs = (record.baseline, record.candidate) if isinstance(record, Comparison) else (record,)
    measured = (run for run in runs if isinstance(run, Measurement) and run.complete and run.origin == "measured")
    return next((run for run in measured if run.spec == request.spec), None)


class Submit(Record):
    """A request on its way into the process of its job."""

    request: Request
    keep: bool = True
    """False: the result does not go into the store."""
    graph: ModelGraph | None = None
    """Graph of the request's model, stored with the run; None if the client has not described the model."""


class Reported(Record, tag=True):
    """The first report of a job shows that its work began."""

    progress: Progress


class Finished(Record, tag=True):
    result: bytes
    """msgpack of the request's result type."""
    run_id: str | None = None
    """Key of the record in the store, written before this event; None if the store does not keep the record."""
    warning: str = ""
    """Reason why the store could not keep the record."""


class Failed(Record, tag=True):
    failure: Failure


Event = Reported | Finished | Failed

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 40


STEPS_OF_A_FIT = 12
"""Levers that a fit plays and judges: each may take as long as a run."""


def time_limit_s(request: Request) -> float:
    """Time limit of a request in seconds: the longest limit of its run specs, else DESCRIBE_LIMIT_S."""
    longest = max((spec.time_limit_s for spec in specs_of(request)), default=DESCRIBE_LIMIT_S)
    if isinstance(request, FindFit):
        longest *= STEPS_OF_A_FIT
    return longest


def timed_out(request: Request) -> TimedOut:
    """The error of a job whose time is up."""
    return TimedOut(
        f"The run took longer than its time limit of {time_limit_s(request):g} s.",
        hint="Take a smaller size or fewer repeats, or raise the time limit.",
    )


def write_frame(stream: IO[bytes], event: Event) -> None:
    """Writes one event after its length, and flushes the stream."""
    data = to_msgpack(event)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


class Frames:
    """Events of a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, data: bytes) -> None:
        self._received += data

    def next(self) -> Event | None:
        """The next whole event, or None. Raises UnreadableFile for bytes that are no event."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if end > _MOST_BYTES:
            raise UnreadableFile(f"A message of {end:,} bytes was announced.")
        if len(self._received) < end:
            return None
        data = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return from_msgpack(data, Event)  # type: ignore[arg-type]  # a union is no class to mypy
