"""Known runs of the draft, so that a refresh, undo or a preset shows earlier measurements.

Runs of this app are found by their request. For each model the newest runs of the store are read once. Stored runs
must be from this machine and younger than the model's file, as a run of old code says nothing about new code.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from explorer.errors import ExplorerError
from explorer.jobs.store import StoredRun
from explorer.record.base import to_json
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.ui.session import backend

MOST_READ = 12
"""Number of stored runs that are opened for a model."""


def note(key: str, record: Any) -> None:
    """Notes that the run under `key` answers the requests of `record`."""
    for name in _asked(record):
        backend.known().keep(name, key)
    if isinstance(record, Comparison):
        _note_point(key, record)


class Measured(NamedTuple):
    """Result for a policy in a comparison with everything kept."""

    policy: Policy
    step_peak_bytes: int
    time_ratio: float
    time_spread: float | None


def points(baseline: RunSpec) -> tuple[Measured, ...]:
    """Policies compared with `baseline`, each with its last measurement."""
    _found(_spec_key(baseline), baseline.model.target)
    compared: dict[Policy, tuple[str, Measured]] = backend.known().get(_points_key(baseline)) or {}
    return tuple(point for key, point in compared.values() if not backend.known().get(f"gone {key}"))


def _note_point(key: str, record: Comparison) -> None:
    figures, run = record.headlines(), record.candidate
    if not record.comparable or run.step_peak_bytes is None or figures["time_ratio"] is None:
        return
    measured = Measured(run.spec.policy, run.step_peak_bytes, figures["time_ratio"], figures["time_ratio_spread"])
    name = _points_key(record.baseline.spec)
    backend.known().keep(name, (backend.known().get(name) or {}) | {run.spec.policy: (key, measured)})


def measured(spec: RunSpec) -> tuple[str, Measurement] | None:
    """A whole run of exactly `spec`, alone or in a comparison, and the key of its record."""
    key = _found(_spec_key(spec), spec.model.target)
    record = backend.record(key)
    runs = (record.baseline, record.candidate) if isinstance(record, Comparison) else (record,)
    run = next((run for run in runs if isinstance(run, Measurement) and run.spec == spec), None)
    return None if key is None or run is None else (key, run)


def fitted(spec: RunSpec) -> tuple[str, Measurement] | None:
    """The run that fitted after `spec` ran out of memory, and the key of the run's record."""
    key = _found(_fitted_key(spec), spec.model.target)
    record = backend.record(key)
    return (key, record) if key is not None and isinstance(record, Measurement) else None


def compared(baseline: RunSpec, candidate: RunSpec) -> str | None:
    """The key of a comparison of exactly these two."""
    return _found(_pair_key(baseline, candidate), candidate.model.target)


def forget(key: str) -> None:
    """The run under `key` is gone."""
    backend.known().drop(key)
    backend.known().keep(f"gone {key}", "yes")


def _found(name: str, target: str) -> str | None:
    known = backend.known()
    if not known.get(f"read {target}"):
        known.keep(f"read {target}", "yes")
        _read_store(target)
    key: str | None = known.get(name)
    if key is not None:
        try:
            backend.record(key)
        except ExplorerError:  # deleted by another window, or damaged
            forget(key)
            return None
    return key


def _read_store(target: str) -> None:
    """Notes the newest runs of a model, oldest first, so that the newest run wins."""
    try:
        runs = [run for run in backend.store().list() if run.model == target and _is_current(run, target)]
        newest = sorted(runs, key=lambda run: run.created)[-MOST_READ:]
        for run in newest:
            record = backend.store().load(run.run_id)
            if _made_here(record):
                note(run.run_id, record)
    except ExplorerError:  # the Runs page says why the store cannot be read
        return


def _is_current(run: StoredRun, target: str) -> bool:
    file = Path(target.partition(":")[0])
    return run.kind in ("measurement", "comparison") and not (file.is_file() and file.stat().st_mtime > run.created)


def _made_here(record: Any) -> bool:
    run = record.candidate if isinstance(record, Comparison) else record
    return isinstance(run, Measurement) and run.environment.platform == platform.platform(terse=True)


def _asked(record: Any) -> list[str]:
    """Keys of the requests that `record` answers. A run cut short answers none about whole runs; a prediction none."""
    if isinstance(record, Measurement):
        if not record.complete or record.origin == "predicted":
            return []
        refused = [replace(record.spec, policy=one.policy) for one in record.refused[:1]]
        return [_spec_key(record.spec), *map(_fitted_key, refused)]
    if not isinstance(record, Comparison) or record.is_predicted:
        return []
    whole = [_spec_key(run.spec) for run in (record.baseline, record.candidate) if run.complete]
    judged = record.failure is not None or record.reproducible is not None
    return [*whole, *([_pair_key(record.baseline.spec, record.candidate.spec)] if judged else [])]


def _spec_key(spec: RunSpec) -> str:
    return f"measured {to_json(spec).decode()}"


def _fitted_key(spec: RunSpec) -> str:
    return f"fitted instead of {to_json(spec).decode()}"


def _points_key(baseline: RunSpec) -> str:
    return f"points {to_json(baseline).decode()}"


def _pair_key(baseline: RunSpec, candidate: RunSpec) -> str:
    return f"compared {to_json((baseline, candidate)).decode()}"
