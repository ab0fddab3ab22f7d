"""Lines of a terminal on files that hold no run: a policy and a lock, each with the command that uses it.

`explorer/plan/summary.py` has those of a step.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from explorer.plan.names import some
from explorer.plan.sizes import mib
from explorer.plan.summary import NOT_JUDGED, Line
from explorer.record.files import Lock, PolicyFile


def policy_lines(file: PolicyFile, name: str) -> Iterator[Line]:
    """A policy file, its evidence, and the command that checks it on its model."""
    yield "Policy", f"recompute {some(file.policy.blocks)}" if file.policy.blocks else "everything kept"
    if file.evidence is not None and file.evidence.step_peak_bytes is not None:
        verdict = file.evidence.verdict or NOT_JUDGED
        yield "Evidence", f"peak {mib(file.evidence.step_peak_bytes)} measured, gradients {verdict}"
    target = "MODEL" if file.model is None or file.model.is_recorded else file.model.target
    yield "Next", f"checkpoint-explorer check {shlex.quote(name)} {shlex.quote(target)}"


def lock_lines(lock: Lock, name: str) -> Iterator[Line]:
    """A lock, and the command that holds its step against the code of today."""
    target = lock.run.model.target
    yield "Lock", f"{target} under {lock.policy}: peak {mib(lock.step.peak_bytes)} predicted"
    yield "Next", f"checkpoint-explorer lock {shlex.quote(target)} --check {shlex.quote(name)}"
