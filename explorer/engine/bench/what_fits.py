"""The first policy of the ladder whose step fits into memory, each tried in a process.

measure.py measures in this process; a process that ran out of memory does not return it for the next attempt.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from explorer.engine.bench.measure import measure, measure_and_describe
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.model.describe import describe
from explorer.errors import OutOfMemory
from explorer.plan.policy.presets import ladder
from explorer.record.measurement import Measurement, Refused
from explorer.record.plan import Report, silent
from explorer.record.policy import Policy
from explorer.record.run import RunSpec


def measure_what_fits(spec: RunSpec, report: Report = silent, *, with_graph: bool = False) -> Measurement:
    """The run of `spec`, or the first policy of the ladder that fits if `spec` is out of memory.

    `refused` lists the earlier runs, beginning with `spec`: the least held bytes and the place of the refusal. The
    baseline is composed from the run that fits (plan/predict/baseline.py). Each attempt has its process, as a process
    does not return all memory. `with_graph`: as `measure_and_describe`. If no policy fits, the last attempt is returned
    with its failure. Raises the errors of load and prepare, OutOfMemory if the system ended even the last attempt.
    """
    refused: list[Refused] = []
    function, graph = measure_and_describe if with_graph else measure, None
    for name, policy in _attempts(spec):
        prefixed = _prefixed(report, f"{refused[-1].what} does not fit, now {name}: ") if refused else report
        attempt, what = replace(spec, policy=policy), f"measured {spec.model.target}"
        run = call_in_subprocess(function, attempt, report=prefixed, what=what)
        if run is not None and run.graph is not None:
            function, graph = measure, run.graph
        if run is not None and (run.failure is None or run.failure.kind != "out of memory"):
            return replace(run, refused=tuple(refused), graph=graph)
        held_peak_bytes, where = (None, "") if run is None else (run.held_peak_bytes, run.failed_in)
        refused.append(Refused(what=name, policy=policy, held_peak_bytes=held_peak_bytes, failed_in=where))
    if run is None:
        raise OutOfMemory(
            f"The system ended the step for lack of memory, with {name} too.",
            hint="Take a smaller size or batch, or split the batch into microbatches.",
        )
    return replace(run, refused=tuple(refused[:-1]), graph=graph)


def _attempts(spec: RunSpec) -> Iterator[tuple[str, Policy]]:
    yield "the policy" if spec.policy.units else "everything kept", spec.policy
    for name, policy in ladder(describe(spec.model, seed=spec.seed)):
        yield f"{name} recomputed", policy


def _prefixed(report: Report, prefix: str) -> Report:
    return lambda progress: report(replace(progress, what=prefix + progress.what))
