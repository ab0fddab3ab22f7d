"""First run of a step that may not fit. The requested policy runs first, then the ladder until a run fits.

Each refused run is recorded beside the run that fits: its least held bytes, and the place of the refusal. The baseline
is composed from the run that fits (plan/predict/baseline.py), so that every policy can be compared with the baseline.

Each attempt has its process, because a process does not return all memory for the next attempt.
"""

from __future__ import annotations

import msgspec

from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.measure.measure import measure
from explorer.engine.model.describe import describe
from explorer.errors import OutOfMemory
from explorer.plan.policy.presets import ladder
from explorer.record.measurement import Measurement, Refused
from explorer.record.plan import Progress, Report, silent
from explorer.record.run import RunSpec


def measure_what_fits(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`, or the first policy of the ladder that fits if `spec` is out of memory.

    `refused` lists the earlier runs, beginning with `spec`. If no policy fits, the last attempt is returned with its
    failure. Raises the errors of load and prepare, and OutOfMemory if the system ended even the last attempt.
    """
    tried, run = "everything kept" if not spec.policy.units else "the policy", _attempt(spec, report)
    refused: list[Refused] = []
    for name, policy in ladder(describe(spec.model, seed=spec.seed)) if _does_not_fit(run) else ():
        refused.append(_refused(run, tried, spec))
        tried, spec = f"{name} recomputed", msgspec.structs.replace(spec, policy=policy)
        run = _attempt(spec, _prefixed(report, f"{refused[-1].what} does not fit, now {tried}"))
        if not _does_not_fit(run):
            break
    if run is None:
        raise OutOfMemory(
            f"The system ended the step for lack of memory, with {tried} too.",
            hint="Take a smaller size or batch, or split the batch into microbatches.",
        )
    return msgspec.structs.replace(run, refused=tuple(refused))


def _does_not_fit(run: Measurement | None) -> bool:
    return run is None or (run.failure is not None and run.failure.kind == "out of memory")


def _refused(run: Measurement | None, tried: str, spec: RunSpec) -> Refused:
    held, where = (None, "") if run is None else (run.held_peak_bytes, run.failed_in)
    return Refused(what=tried, policy=spec.policy, held_peak_bytes=held, failed_in=where)


def _prefixed(report: Report, what: str) -> Report:
    return lambda progress: report(Progress(what=f"{what}: {progress.what}", done=progress.done, total=progress.total))


def _attempt(spec: RunSpec, report: Report) -> Measurement | None:
    """The run in a subprocess; None if the system ended the process for lack of memory. Raises the run's errors."""
    return call_in_subprocess(measure, spec, report=report, what=f"measured {spec.model.target}")
