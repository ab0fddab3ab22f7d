"""Runs that the page shows until this machine has measured a model: of an older file, of another machine, or bundled.

A stand-in is shown with its origin and its age. Unlike the runs of repository.py it answers no request, so the model
is measured.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from explorer.errors import ExplorerError
from explorer.jobs import run_file
from explorer.jobs.protocol import Measure, run_for
from explorer.plan.catalogue import recorded_sample
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan
from explorer.record.run import RunSpec
from explorer.ui.session import backend
from explorer.ui.session.repository import MOST_READ, ran_here, request_key, runs


class EarlierRun(NamedTuple):
    """A run with everything kept that the page shows until this machine has measured the model."""

    key: str
    run: Measurement
    """With the model's graph."""
    created: float | None = None
    """Seconds since 1970 of a run of the store; None: bundled with the sample models."""
    here: bool = False
    """Whether this machine ran it."""
    plans: tuple[Plan, ...] = ()


def stand_in(spec: RunSpec) -> EarlierRun | None:
    """The stand-in for a run of exactly `spec`, if there is one."""
    key = f"{backend.store().state()} {request_key(spec)}"
    shown: tuple[EarlierRun | None] = runs().stand_ins.get_or_make(key, lambda: (_stored(spec) or _bundled(spec),))
    return shown[0]


def _stored(spec: RunSpec) -> EarlierRun | None:
    """The newest whole run of the store with the specification `spec` and a graph; its code may have changed since."""
    try:
        stored = [run for run in backend.store().list() if run.model == spec.model.target and run.spec is not None]
        for row in sorted(stored, key=lambda row: -row.created)[:MOST_READ]:
            record = runs().record(row.run_id) if _asks_alike(row.spec, spec) else None
            run = run_for(Measure(spec=spec), record) if record is not None else None
            graph = run_file.graph_of(record) if record is not None else None
            if run is not None and graph is not None:
                return EarlierRun(row.run_id, replace(run, graph=graph), row.created, ran_here(run))
    except ExplorerError:  # the Runs page says why the store cannot be read
        pass
    return None


def _asks_alike(stored: RunSpec | None, spec: RunSpec) -> bool:
    """Whether the runs differ in their policy and split at most."""
    return stored is not None and replace(stored, policy=spec.policy, plan=spec.plan) == spec


def _bundled(spec: RunSpec) -> EarlierRun | None:
    recorded = recorded_sample(spec.model)
    if recorded is None or recorded.run.spec != spec:
        return None
    return EarlierRun(f"bundled {request_key(spec)}", recorded.run, plans=recorded.front.plans)
