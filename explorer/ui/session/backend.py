"""The worker and the store that all visitors of this app share, and their recent records.

Streamlit runs a page again and again; objects that outlive a run live here. No import here loads torch.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

import streamlit as st

from explorer.errors import BadInput, ExplorerError
from explorer.jobs.client import Worker
from explorer.jobs.protocol import FindPlans
from explorer.jobs.store import Store
from explorer.plan.catalogue import Sample, catalogue, own_samples
from explorer.record.base import to_json
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.plan import Wish
from explorer.record.run import Device, RunSpec

KEPT = 24
"""Records held in memory; the rest is read from the store again."""
MOST_FRONTS = 32
MOST_KNOWN = 4096
"""Number of requests whose answers are remembered by run id."""


class Records:
    """The last few records by key: a run id or a request. All sessions share the records."""

    def __init__(self, limit: int = KEPT) -> None:
        self._records: OrderedDict[str, Any] = OrderedDict()
        self._limit = limit
        self._lock = Lock()

    def keep(self, key: str, record: Any) -> None:
        with self._lock:
            self._records[key] = record
            self._records.move_to_end(key)
            while len(self._records) > self._limit:
                self._records.popitem(last=False)

    def get(self, key: str) -> Any:
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key)
            return self._records.get(key)

    def drop(self, record: Any) -> None:
        """Forgets `record` under every key."""
        with self._lock:
            for key in [key for key, kept in self._records.items() if kept == record]:
                del self._records[key]


@st.cache_resource(show_spinner=False)
def worker() -> Worker:
    """The warm child process."""
    return Worker()


@st.cache_resource(show_spinner=False)
def store() -> Store:
    """Every finished run."""
    return Store()


@st.cache_resource(show_spinner=False)
def records() -> Records:
    """Records computed or opened lately."""
    return Records()


@st.cache_resource(show_spinner=False)
def fronts() -> Records:
    """The jobs that look, or looked, for the plans of a measured step: see explorer/ui/explore/plans.py."""
    return Records(MOST_FRONTS)


def give_way() -> None:
    """Cancels searches for fronts, which no person requested, so that the worker is free for a request."""
    for job in worker().open_jobs():
        if isinstance(job.request, FindPlans) and job.request.wish == Wish():
            job.cancel()


@st.cache_resource(show_spinner=False)
def known() -> Records:
    """Run ids by request: see explorer/ui/session/known.py."""
    return Records(MOST_KNOWN)


@st.cache_resource(show_spinner=False)
def samples() -> tuple[Sample, ...]:
    """Models on offer: the sample models, and models named on the command line after `--model`.

    The browser supplies neither code nor paths, but picks from this list.
    """
    given = given_after("--model", sys.argv[1:])
    known = catalogue()
    offered = {sample.target for sample in known}
    return (*own_samples(target for target in given if target not in offered), *known)


def weights() -> tuple[str, ...]:
    """Files with weights that a model may start from, as named on the command line after `--weights`."""
    given = given_after("--weights", sys.argv[1:])
    return tuple(dict.fromkeys(str(Path(file).resolve()) for file in given))


def predicts() -> bool:
    """Whether a visit begins without allocating its model: the app was started with `--predict`."""
    return "--predict" in sys.argv[1:]


def check_offered(model: ModelRef) -> None:
    """Raises BadInput unless `model` and its weights are on the lists: links and run files must not make this machine
    load others."""
    if model.is_recorded:
        raise BadInput(
            f"{model.target} is a step that was recorded in a script: its model is not here to run.",
            hint="Policies are forecast from the record; apply the policy file in that script and record again.",
        )
    sample = next((sample for sample in samples() if sample.target == model.target), None)
    if sample is None:
        raise BadInput(
            f"The model {model.target} is not offered here.",
            hint=f"Start the app with `-- --model {model.target}` if you trust it.",
        )
    if model.weights and model.weights not in weights():
        raise BadInput(
            f"The weights {model.weights} are not offered here.",
            hint=f"Start the app with `-- --weights {model.weights}` if you trust them.",
        )
    if model.size is not None and model.size not in sample.sizes:
        raise BadInput(f"{sample.name} has no size {model.size}.", hint=f"It has {', '.join(sample.sizes) or 'none'}.")
    usual = sample.usual(model.size)
    wrong = [name for name, value in model.arguments.items() if type(value) is not type(usual.get(name))]
    if wrong:
        raise BadInput(f"{sample.name} takes no argument {', '.join(wrong)} of that type.")


def given_after(flag: str, arguments: list[str]) -> tuple[str, ...]:
    """The values of every `--model REF` and `--model=REF`, for the flag `--model`."""
    values = [following for word, following in zip(arguments, arguments[1:]) if word == flag]
    values += [word.removeprefix(f"{flag}=") for word in arguments if word.startswith(f"{flag}=")]
    return tuple(values)


def record(key: str | None) -> Any:
    """The record under `key`: from memory, else from the store; None for no key. Raises as Store.load does."""
    if key is None:
        return None
    held = records().get(key)
    if held is None:
        held = store().load(key)
        records().keep(key, held)
    return held


def recorded_run(model: ModelRef) -> str | None:
    """Id of the recorded run that `model` stands for: the run opened last, else the newest run of the store."""
    run_id: str | None = known().get(f"recorded {model.target}")
    if run_id is None:
        stored = [run for run in store().list() if run.model == model.target and run.kind == "measurement"]
        run_id = max(stored, key=lambda run: run.created).run_id if stored else None
        known().keep(f"recorded {model.target}", run_id)
    return run_id


def graph_key(model: ModelRef, device: Device, *, without_data: bool = False) -> str:
    """Key of the graph of `model`, described on `device`."""
    return f"graph {'without data ' if without_data else ''}{device} {to_json(model).decode()}"


def foreseen_key(spec: RunSpec) -> str:
    """Key of the predicted step of `spec`, simulated without data."""
    return f"foreseen {to_json(spec).decode()}"


def graph_of(spec: RunSpec, *, without_data: bool = False) -> ModelGraph | None:
    """Graph of the model of `spec` on its device, if described lately; a recorded step contains its graph.

    A graph described without data may lack properties that depend on values.
    """
    if spec.model.is_recorded:
        try:
            run = record(recorded_run(spec.model))
        except ExplorerError:  # deleted by another window, or damaged
            return None
        return run.graph if isinstance(run, Measurement) else None
    graph = records().get(graph_key(spec.model, spec.device, without_data=without_data))
    return graph if isinstance(graph, ModelGraph) else None
