"""What ran and what was computed from it, for all visitors: values by kind and key, each kind with its own bound.

A run is found by the request that it answers, so that a refresh, undo or a preset shows an earlier measurement. For
each model the newest runs of the store are read, again whenever a process has saved a run. Stored runs must be from
this machine and younger than the model's file, as a run of old code says nothing about new code. Read `Runs` first.
"""

from __future__ import annotations

import platform
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from importlib import metadata
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import streamlit as st
from msgspec.structs import replace

from explorer import slices
from explorer.errors import ExplorerError
from explorer.jobs import run_file
from explorer.jobs.store import StoredRun
from explorer.plan.catalogue import is_younger
from explorer.record.base import Record, to_json
from explorer.record.comparison import Comparison
from explorer.record.graph import IN_TRAINING, Conditions, ModelGraph, ModelRef
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import Device, RunSpec
from explorer.ui.session import backend

MOST_READ = 12
"""Number of stored runs that are opened for a model."""
MOST = {
    "record": 24, "prediction": 24, "graph": 24, "chart": 24,
    "forecaster": 12, "completed run": 12, "earlier run": 12,
    "forecast": 4096, "points": 4096, "answer": 8192,
}  # fmt: skip
"""Number of values of a kind that memory holds.

record: results of jobs, and runs of the store, by id. prediction: steps that were played, by request.
answer: id of the run that answers a request. The other kinds are computed, and the key names what from.
"""
MOST_OF_OTHERS = 64
T = TypeVar("T")


class Recent(Generic[T]):
    """The values used last, by key. Several threads may use them."""

    def __init__(self, limit: int) -> None:
        self._values: OrderedDict[str, T] = OrderedDict()
        self._limit = limit
        self._lock = Lock()

    def add(self, key: str, value: T) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)

    def get(self, key: str) -> T | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def get_or_make(self, key: str, make: Callable[[], T]) -> T:
        """The value under `key`; `make` computes a value that is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        self.add(key, value)
        return value

    def drop(self, value: T) -> None:
        """Drops `value` under every key."""
        with self._lock:
            for key, other in list(self._values.items()):
                if other == value:
                    del self._values[key]


class KeyedRun(NamedTuple):
    """A run, and the key of the record that holds the run or of the runs that it was put together from."""

    key: str
    run: Measurement


class Point(NamedTuple):
    """Result for a policy in a comparison with everything kept."""

    policy: Policy
    step_peak_bytes: int
    time_ratio: float
    time_spread: float | None


class Runs:
    """The repository. Keys are run ids of the store, ids of jobs whose result the store lacks, or requests as JSON."""

    def __init__(self) -> None:
        self._kinds: dict[str, Recent[Any]] = {}
        self._answers: Recent[str] = self.of("answer")
        self._models_read: dict[str, object] = {}
        """State of the store when the runs of a model were read last."""
        self._created: dict[str, float] = {}
        """Dates of the runs that were read from the store, by id."""
        self._deleted: set[str] = set()

    def of(self, kind: str) -> Recent[Any]:
        """The values of a kind. No kind pushes another out."""
        return self._kinds.setdefault(kind, Recent(MOST.get(kind, MOST_OF_OTHERS)))

    def once(self, kind: str, key: str, make: Callable[[], T]) -> T:
        """The value of a kind under `key`, made on the first call."""
        value: T = self.of(kind).get_or_make(key, make)
        return value

    def record(self, key: str | None) -> Any:
        """The record under `key`: from memory, else from the store; None for no key. Raises as Store.load does."""
        if key is None:
            return None
        return self.in_memory(key) or self.once("record", key, lambda: backend.store().load(key))

    def in_memory(self, key: str) -> Record | None:
        record: Record | None = self.of("record").get(key) or self.of("prediction").get(key)
        return record

    def graph(self, spec: RunSpec, *, without_data: bool = False) -> ModelGraph | None:
        """Graph of the model of `spec` on its device, if described lately; a recorded step contains its graph."""
        if not spec.model.is_recorded:
            # A measured run brings the graph of its conditions: until then the graph is drawn as in training.
            conditions = (spec.conditions,) if without_data else (spec.conditions, IN_TRAINING)
            keys = (_graph_key(spec.model, spec.device, without_data, each) for each in conditions)
            return next((graph for key in keys if (graph := self.of("graph").get(key)) is not None), None)
        try:
            run = self.record(self.recorded_run(spec.model))
        except ExplorerError:  # deleted by another window, or damaged
            return None
        return run.as_run.graph if isinstance(run, Measurement | RecordedRanks) else None

    def add_graph(self, model: ModelRef, device: Device, graph: ModelGraph, *, without_data: bool = False) -> None:
        self.of("graph").add(_graph_key(model, device, without_data, graph.conditions), graph)

    def recorded_run(self, model: ModelRef) -> str | None:
        """Id of the recorded run that `model` stands for: the run opened last, else the newest run of the store."""
        key = f"recorded {model.target}"
        if self._answers.get(key) is None:
            kinds = ("measurement", "recorded ranks")
            stored = [run for run in backend.store().list() if run.model == model.target and run.kind in kinds]
            newest = max(stored, key=lambda run: run.created, default=None)
            if newest is not None:
                self._answers.add(key, newest.run_id)
        return self._answers.get(key)

    def prediction(self, spec: RunSpec) -> KeyedRun | None:
        """The step of `spec`, simulated without data; of several ranks the fullest."""
        run = self.of("prediction").get(key := request_key(spec))
        return KeyedRun(key, run.as_run) if isinstance(run, Measurement | RecordedRanks) else None

    def add_prediction(self, spec: RunSpec, run: Measurement | RecordedRanks) -> KeyedRun:
        self.of("prediction").add(key := request_key(spec), run)
        return KeyedRun(key, run.as_run)

    def predicted_ranks(self, spec: RunSpec) -> RecordedRanks | None:
        """All ranks of the predicted step of `spec`."""
        run = self.of("prediction").get(request_key(spec))
        return run if isinstance(run, RecordedRanks) else None

    def predicted_pair(self, baseline: RunSpec, candidate: RunSpec) -> str | None:
        """Key of the comparison of two predicted runs; None if a run is not predicted yet."""
        first, second = self.prediction(baseline), self.prediction(candidate)
        if first is None or second is None:
            return None
        key = request_key(baseline, candidate)
        self.once("prediction", key, lambda: Comparison(baseline=first.run, candidate=second.run))
        return key

    def baseline(self, candidate: RunSpec) -> RunSpec:
        """Baseline of `candidate`: everything kept, else the run that fitted in its place."""
        spec = replace(candidate, policy=KEEP_ALL)
        fitted = None if self.measured(spec) else self.fitted(spec)
        return spec if fitted is None else fitted.run.spec

    def measured(self, spec: RunSpec) -> KeyedRun | None:
        """A whole run of exactly `spec`, alone or in a comparison."""
        key = self.answer("priced", spec) or self.answer("measured", spec)
        record = self.record(key)
        runs = (record.baseline, record.candidate) if isinstance(record, Comparison) else (record,)
        run = next((run for run in runs if isinstance(run, Measurement) and run.spec == spec), None)
        return None if key is None or run is None else KeyedRun(key, run)

    def fitted(self, spec: RunSpec) -> KeyedRun | None:
        """The run that fitted after `spec` ran out of memory."""
        key = self.answer("fitted", spec)
        record = self.record(key)
        return KeyedRun(key, record) if key is not None and isinstance(record, Measurement) else None

    def add_answer(self, key: str, kind: str, *request: RunSpec) -> None:
        """The run under `key` answers a request from now on."""
        self._answers.add(f"{kind} {request_key(*request)}", key)

    def answer(self, kind: str, *request: RunSpec) -> str | None:
        """Key of the run that answers a request; None if no run does, or if the run was deleted.

        `kind`: of the answer. priced: a whole run with the prices that a plan needs, which runs of a comparison lack.
        measured: any other whole run. fitted: the run in place of one that ran out of memory.
        """
        self._read_store(request[-1].model.target)
        key = self._answers.get(f"{kind} {request_key(*request)}")
        if key is not None:
            try:
                self.record(key)
            except ExplorerError:  # deleted by another window, or damaged
                self.drop(key)
                return None
        return key

    def created(self, key: str | None) -> float | None:
        """Seconds since 1970 of a run that was read from the store; None for other runs."""
        return self._created.get(key or "")

    def compared(self, baseline: RunSpec, candidate: RunSpec) -> str | None:
        """The key of a comparison of exactly these two."""
        return self.answer("compared", baseline, candidate)

    def points(self, baseline: RunSpec) -> tuple[Point, ...]:
        """Policies compared with `baseline`, each with its last measurement."""
        self.answer("measured", baseline)
        points = self.of("points").get(request_key(baseline)) or {}
        return tuple(point for key, point in points.values() if key not in self._deleted)

    def add(self, key: str, record: Record) -> None:
        """Adds a record that ran, or was opened, under `key`, as the answer to its requests."""
        self.of("record").add(key, record)
        self._add_answers(key, record)

    def _add_answers(self, key: str, record: Record) -> None:
        """A run cut short answers no request for a whole run; a prediction answers none."""
        if isinstance(record, Measurement) and record.complete and record.origin != "predicted":
            is_priced = record.times is not None and record.times.checkpoint_ms is not None
            self.add_answer(key, "priced" if is_priced else "measured", record.spec)
            for refused in record.refused[:1]:
                self.add_answer(key, "fitted", replace(record.spec, policy=refused.policy))
        if not isinstance(record, Comparison) or record.is_predicted:
            return
        for run in (record.baseline, record.candidate):
            if run.complete:
                self.add_answer(key, "measured", run.spec)
        if record.failure is not None or record.reproducible is not None:
            self.add_answer(key, "compared", record.baseline.spec, record.candidate.spec)
        self._add_point(key, record)

    def _add_point(self, key: str, record: Comparison) -> None:
        figures, run = record.headlines(), record.candidate
        if not record.comparable or run.step_peak_bytes is None or figures["time_ratio"] is None:
            return
        point = Point(run.spec.policy, run.step_peak_bytes, figures["time_ratio"], figures["time_ratio_spread"])
        request = request_key(record.baseline.spec)
        self.of("points").add(request, (self.of("points").get(request) or {}) | {run.spec.policy: (key, point)})

    def drop(self, key: str) -> None:
        """Removes the answers of a run that was deleted."""
        self._answers.drop(key)
        self._deleted.add(key)

    def open(self, run_id: str) -> Record:
        """The record of a stored run. A run of this machine answers its requests from now on. Raises as Store.load."""
        record: Record = self.record(run_id)
        if not is_imported(run_id) and ran_here(record):
            self._add_answers(run_id, record)
        if isinstance(record, Measurement | RecordedRanks) and record.spec.model.is_recorded:
            self._answers.add(f"recorded {record.spec.model.target}", run_id)
        return record

    def _read_store(self, target: str) -> None:
        """Adds the newest runs of a model that the store has got since the last call, oldest first."""
        store = backend.store()
        if self._models_read.get(target) == (state := store.state()):
            return
        self._models_read[target] = state
        try:
            measured = [run for run in store.list() if run.model == target and not run.imported]
            runs = [run for run in measured if is_current(run, target)]
            for run in sorted(runs, key=lambda run: run.created)[-MOST_READ:]:
                if run.run_id in self._created:
                    continue
                self._created[run.run_id] = run.created
                record = self.in_memory(run.run_id) or store.load(run.run_id)
                if ran_here(record):
                    self._add_answers(run.run_id, record)
        except ExplorerError:  # the Runs page says why the store cannot be read
            return


@st.cache_resource(show_spinner=False)
def runs() -> Runs:
    """The repository of this server."""
    return Runs()


def request_key(*specs: Record) -> str:
    """A request as a key."""
    return " ".join(to_json(spec).decode() for spec in specs)


def _graph_key(model: ModelRef, device: Device, without_data: bool, conditions: Conditions) -> str:
    return f"{device}{' without data' if without_data else ''} {request_key(model)} {conditions}"


def is_current(run: StoredRun, target: str) -> bool:
    """Whether a stored run is younger than the file of its model."""
    return run.kind in ("measurement", "comparison") and is_younger(run.created, target)


def is_imported(run_id: str) -> bool:
    """Whether a stored run came from a file. Such a run is shown as it is and answers for no measurement."""
    return any(run.imported for run in backend.store().list() if run.run_id == run_id)


def ran_here(record: Record) -> bool:
    """Whether a run says that it is of this machine and of the torch that is installed now."""
    run = record.candidate if isinstance(record, Comparison) else record
    here = (platform.platform(terse=True), _installed_torch())
    return isinstance(run, Measurement) and here == (run.environment.platform, _release(run.environment.torch_version))


def _release(version: str) -> str:
    """`2.13.0` of `2.13.0+cpu`."""
    return version.partition("+")[0]


@cache
def _installed_torch() -> str:
    """Release of torch, which this process does not import; empty: nothing can run here."""
    try:
        return _release(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return ""


PAGES = {
    "measurement": "explore",
    "comparison": "explore",
    "recorded ranks": "explore",
    **{kind: name for name, part in slices.parts("jobs").items() for kind in part.KINDS},
}
"""Which page shows which kind of run."""
OPENED = "opened_run"


class OpenedRun(NamedTuple):
    """A run that its page shall show; nothing is measured again."""

    run_id: str
    record: Record


def open_on_page(run: StoredRun) -> str:
    """Names `run` for its page, which takes it when drawn next; returns that page. Raises as `Store.load` does."""
    runs().open(run.run_id)
    st.session_state[OPENED] = [PAGES[run.kind], run.run_id]
    return PAGES[run.kind]


def opened_run(page: str) -> OpenedRun | None:
    """The run opened on `page`; a second call returns None."""
    opened = st.session_state.get(OPENED)
    if opened is None or opened[0] != page:
        return None
    del st.session_state[OPENED]
    record = runs().record(opened[1])
    _draw_from_file(record)
    return OpenedRun(opened[1], record)


def _draw_from_file(record: Record) -> None:
    """Draws a model that is not offered here by its run's graph. A model on offer is described instead, as its code may
    differ from the file."""
    graph, spec = run_file.graph_of(record), run_file.spec_of(record)
    if graph is None or spec is None:
        return
    try:
        backend.check_offered(spec.model)
    except ExplorerError:
        predicted = getattr(getattr(record, "candidate", record), "origin", "") == "predicted"
        runs().add_graph(spec.model, spec.device, graph, without_data=predicted)
