"""The first run of a step that may not fit: as asked, and where memory is refused, down the ladder until a run fits.

What did not fit is said beside the run that did: at least how much it held, and where it was refused. From that run
the baseline is put together (plan/forecast/keep_all.py), so that everything can be compared with it.

Each attempt has a process of its own: what one took, its process would not give back for the next.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import tempfile
from typing import IO

import msgspec

from explorer.child_process.forks import Forked, at_hand, server_is_gone
from explorer.engine.device.free_memory import n_oom_kills
from explorer.engine.device.limits import limited_by_machine
from explorer.engine.measure.measure import measure
from explorer.engine.model.describe import describe
from explorer.errors import Crashed, ExplorerError, OutOfMemory
from explorer.plan.policy.ladder import ladder
from explorer.record.base import from_json, to_json
from explorer.record.measurement import Measurement, Refused
from explorer.record.progress import Progress, Report, silent
from explorer.record.run import RunSpec

_POLL_S = 0.25


def measure_what_fits(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`, or, where it is out of memory, the first policy of the ladder whose run is not.

    Its `refused` are the runs before it, the one of `spec` first. Where none fits it is the last that was tried, with
    its failure. Raises what load and prepare raise, and OutOfMemory where the system ended even the last.
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
    """None: the system ended its process for lack of memory. Raises what it raised."""
    n_before = n_oom_kills()
    with tempfile.TemporaryFile() as result, os.fdopen((pipe := os.pipe())[0], "rb", buffering=0) as said:
        process = at_hand().start(run_attempt, spec, files=[pipe[1], result.fileno()], needs=["torch._dynamo"])
        os.close(pipe[1])
        try:
            _listen(process, said, report)
        finally:
            process.close()
        if process.code == 0:
            return _read(result)
        if process.code == -signal.SIGKILL and n_before is not None and (n_oom_kills() or 0) > n_before:
            return None
        if process.code is None:
            raise server_is_gone()
        raise Crashed(
            f"The process that measured {spec.model.target} ended with exit code {process.code}.",
            hint="What it wrote before that says why; the next run starts a new one.",
        )


def _listen(process: Forked, said: IO[bytes], report: Report) -> None:
    """Passes on its progress until it has ended; `report` may raise to end it all."""
    lines, last = bytearray(), Progress(what="starting", done=0, total=0)
    while True:
        over = process.ended  # asked first: what it said before that is in the pipe
        ready, _, _ = select.select([said], [], [], 0 if over else _POLL_S)
        chunk = said.read(65_536) if ready else b""
        lines += chunk or b""
        while (end := lines.find(b"\n")) >= 0:
            last = from_json(bytes(lines[:end]), Progress)
            report(last)
            del lines[: end + 1]
        if over and not chunk:
            return
        if not ready:
            report(last)
        elif not chunk:
            process.wait(_POLL_S)


def _read(result: IO[bytes]) -> Measurement:
    result.seek(0)
    found = pickle.load(result)
    if isinstance(found, ExplorerError):
        raise found
    assert isinstance(found, Measurement)
    return found


def run_attempt(spec: RunSpec, voice: int, result: int) -> None:
    """The child's side: progress as lines of JSON, then the run, or what was raised."""

    def report(progress: Progress) -> None:
        os.write(voice, to_json(progress) + b"\n")

    found: Measurement | ExplorerError
    try:
        with limited_by_machine():
            found = measure(spec, report)
    except ExplorerError as error:
        found = error
    with os.fdopen(result, "wb") as file:
        pickle.dump(found, file)
