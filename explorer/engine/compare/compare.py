"""Runs baseline and candidate from one state, measures them in turns, then compares their results bit by bit.

measure_pair ─▶ saved bytes and added time
baseline ─▶ baseline again ─▶ float64 ─▶ candidate ─▶ candidate, watched
            └ noise floor     └ rounding             └ masks, state
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from explorer.engine.bench.measure import measure_pair
from explorer.engine.bench.step import Trainee, forward_backward, prepare
from explorer.engine.compare.carried import carried, n_looked_at, names, not_walked, unstable
from explorer.engine.compare.diffs import differences
from explorer.engine.compare.draws import DrawWatch
from explorer.engine.compare.module_state import StateAudit
from explorer.engine.compare.outcome import (
    Outcome,
    Yardsticks,
    eval_difference,
    not_reproducible_because,
    parameter_differences,
    rng_differences,
    same_gradients,
    take,
)
from explorer.engine.compare.probe import probe
from explorer.engine.compare.reference import coarsest_epsilon, reference
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state, tf32_kinds, without_tf32
from explorer.engine.state.snapshot import SharedSnapshot
from explorer.engine.state.state_diff import StateKey
from explorer.engine.watch.checkpoint_error import failure_in_words
from explorer.errors import BadInput, Cancelled
from explorer.plan.hazards.hazards import hazards
from explorer.plan.why.gradients import causes
from explorer.record.comparison import BufferDiff, Comparison, GradientDiff, MaskDiff, StateChange
from explorer.record.failure import Failure
from explorer.record.graph import Hazard
from explorer.record.measurement import Measurement
from explorer.record.plan import Progress, Report, silent
from explorer.record.run import RunSpec

_N_STAGES = 5


class Meter:
    """Progress over the measurement and the comparison as one count."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._measured = 0
        self._stage = 0

    def __call__(self, progress: Progress) -> None:
        self._measured = progress.total
        self._report(msgspec.structs.replace(progress, total=progress.total + _N_STAGES))

    def step(self, what: str) -> None:
        done = self._measured + self._stage
        self._stage += 1
        self._report(Progress(what=what, done=done, total=self._measured + _N_STAGES))


def compare(baseline: RunSpec, candidate: RunSpec, *, full: bool = True, report: Report = silent) -> Comparison:
    """Measures both runs and compares their gradients, buffers, parameters and generators.

    `full` False leaves out rerun, float64 reference, further steps, masks and state audit. The failure of a run is a
    result: `failure` gives the reason beside both measurements.
    Raises BadInput if the specs differ in more than policy and plan, and what loading the model raises.
    """
    _same_but_for_the_policy(baseline, candidate)
    meter = Meter(report)
    probed = probe(baseline, candidate, report) if full and baseline.plan is None and candidate.plan is None else {}
    measured = measure_pair(baseline, candidate, meter)
    failed = _first_failure(*measured)
    comparison = Comparison(baseline=measured[0], candidate=measured[1], failure=failed)
    if failed is not None:
        return comparison
    coarse = tf32_kinds() if baseline.device == "cuda" else ()
    with preserve_global_state(), deterministic_kernels(strict=runs_strictly(baseline)), without_tf32():
        judged = equivalence(baseline, candidate, full=full, meter=meter)
    judged |= {"without_tf32": coarse, **probed}
    return with_causes(msgspec.structs.replace(comparison, **judged))


def with_causes(comparison: Comparison) -> Comparison:
    """The comparison with likely causes, which include the hazards of a candidate that differs."""
    spec, fired = comparison.candidate.spec, tuple[Hazard, ...]()
    if comparison.verdict in ("different", "state moved") and spec.policy.units:
        with suppress(Exception):  # a model that runs may fail to be described: causes then lack hazards
            fired = hazards(describe(spec.model, seed=spec.seed, device=spec.device), spec.policy, spec=spec)
    return msgspec.structs.replace(comparison, causes=(*_hidden(comparison), *causes(comparison, fired)))


def _hidden(comparison: Comparison) -> tuple[str, ...]:
    """A cause for each finding of the probe."""
    return tuple(
        f"{block} leaves another step behind after {comparison.n_probes} more runs, with all known state put back: it "
        "remembers its calls where no list looks (a file, an installed package, an iterator). Ask "
        "explorer.is_recomputing() before that state moves."
        for block in comparison.hidden_state
    )


def _first_failure(baseline: Measurement, candidate: Measurement) -> Failure | None:
    """The failure of the baseline, else of the candidate; the sentence names the run."""
    for name, run in (("baseline", baseline), ("candidate", candidate)):
        if run.failure is not None:
            return msgspec.structs.replace(run.failure, sentence=f"In the {name}: {run.failure.sentence}")
    return None


def equivalence(baseline: RunSpec, candidate: RunSpec, *, full: bool, meter: Meter) -> dict[str, Any]:
    """The fields of a Comparison that give its verdict: both specs run from copies of one loaded model."""
    loaded = load_for(baseline)
    start = SharedSnapshot(loaded.model)

    def fresh(spec: RunSpec) -> Trainee:
        start.restore()
        return prepare(spec, loaded)

    meter.step("baseline, for its gradients")
    trainee = fresh(baseline)
    if trainee.left_behind:
        return {"reproducible": False, "not_reproducible_because": trainee.left_behind}
    base = take(trainee, full=full)
    fields: dict[str, Any] = {"not_walked": names(not_walked(base))}
    rerun = exact = None
    own_changes = unjudged = frozenset[StateKey]()
    if full:
        meter.step("baseline again: does it equal itself?")
        rerun, own_changes = _rerun(fresh(baseline), base)
        because, unjudged = not_reproducible_because(base, rerun), unstable(base, rerun)
        fields |= {"reproducible": not because, "not_reproducible_because": because, "unjudged": names(unjudged)}
        rerun = rerun if because else base  # equal outcomes need one copy
        meter.step("baseline in float64: how far is it from exact?")
        start.restore()
        exact, because = reference(baseline, loaded, base)
        fields |= {"reference": "float64" if exact else "none", "no_reference_because": because}
    meter.step("candidate, for its gradients")
    try:
        trainee = fresh(candidate)
        cand = take(trainee, full=full, lead=base)
        meter.step("candidate, watched: masks and module state")
        if full and candidate.policy.units:
            fields["masks"], changes = _watched(fresh(candidate))
            own = own_changes | unjudged
            fields["state_changes"] = tuple(c for c in changes if (c.block, c.name, c.kind) not in own)
            fields["masks_watched"] = True
            if candidate.policy.stops_early and any(mask.n_not_drawn_again for mask in fields["masks"]):
                fields["equal_without_early_stop"] = same_gradients(base, _to_the_end(fresh, candidate, base))
    except Cancelled:
        raise
    except Exception as error:  # a user's model may raise anything when it runs again
        return {**fields, "failure": failure_in_words(error, trainee.model)}
    yardsticks = Yardsticks(coarsest_epsilon(baseline, base.gradients), rerun, exact)
    fields |= {"carried": carried(base, cand, yardsticks, unjudged), "n_carried": n_looked_at(base) - len(unjudged)}
    return _moved_again(fields | side_by_side(base, cand, yardsticks))


def _to_the_end(fresh: Callable[[RunSpec], Trainee], candidate: RunSpec, base: Outcome) -> Outcome:
    policy = msgspec.structs.replace(candidate.policy, early_stop=False)
    return take(fresh(msgspec.structs.replace(candidate, policy=policy)), full=False, like=base)


def _moved_again(fields: dict[str, Any]) -> dict[str, Any]:
    """Clears `candidate_error` of state that a recompute moved twice: such a difference is never rounding."""
    changed = {f"{change.block}.{change.name}".lstrip(".") for change in fields.get("state_changes", ())}
    return fields | {
        family: tuple(
            msgspec.structs.replace(diff, candidate_error=None) if diff.name in changed else diff
            for diff in fields[family]
        )
        for family in ("buffers", "carried")
    }


def side_by_side(base: Outcome, cand: Outcome, yardsticks: Yardsticks) -> dict[str, Any]:
    """Every difference between two outcomes, tensor by tensor, as fields of a Comparison."""
    gradients, of_inputs, later = (
        differences(GradientDiff, getattr(base, family), getattr(cand, family), yardsticks.of(family))
        for family in ("gradients", "input_gradients", "later_gradients")
    )
    return {
        "gradients": gradients,
        "input_gradients": of_inputs,
        "later_gradients": later,
        "buffers": differences(BufferDiff, base.buffers, cand.buffers, yardsticks.of("buffers")),
        "parameters": parameter_differences(base, cand, yardsticks, (*gradients, *later)),
        "n_steps": base.n_steps,
        "trains_in_backward": bool(base.trained & base.moved.keys()),
        "rng": rng_differences(base, cand),
        "eval_output": eval_difference(base, cand, yardsticks),
        "loss_equal": base.loss == cand.loss,
    }


def runs_strictly(baseline: RunSpec) -> bool:
    """Whether the step runs with deterministic kernels alone. False on a CPU, where the answer changes nothing."""
    if baseline.device == "cpu":
        return False
    try:
        with preserve_global_state(), deterministic_kernels(strict=True):
            trainee = prepare(baseline)
            forward_backward(trainee)
            trainee.handle.undo()
    except RuntimeError:  # an operator has no deterministic kernel; the model's own errors appear in the next run
        return False
    return True


def _rerun(trainee: Trainee, first: Outcome) -> tuple[Outcome, frozenset[StateKey]]:
    """A second run of the baseline, and the state that its backward changes without any recompute."""
    audit = StateAudit(trainee.model)
    return take(trainee, on_phase=audit.on_phase, like=first), frozenset(audit.changes)


def _watched(trainee: Trainee) -> tuple[tuple[MaskDiff, ...], tuple[StateChange, ...]]:
    """Masks and state changes at recompute, from a separate step of the candidate that is not compared."""
    audit = StateAudit(trainee.model)
    watch = DrawWatch(trainee.model, trainee.spec.policy)
    with watch:
        forward_backward(trainee, audit.on_phase)
    audit.close()
    return watch.masks, tuple(audit.changes.values())


def _same_but_for_the_policy(baseline: RunSpec, candidate: RunSpec) -> None:
    free = {"policy", "plan"}
    differing = [
        name for name in RunSpec.__struct_fields__
        if name not in free and getattr(baseline, name) != getattr(candidate, name)
    ]  # fmt: skip
    if differing:
        both = "; ".join(f"{name}: {getattr(baseline, name)!r} and {getattr(candidate, name)!r}" for name in differing)
        raise BadInput(
            f"Baseline and candidate differ in more than their policy ({both}).",
            hint="Only runs of one model, batch, device and seed can be compared.",
        )
