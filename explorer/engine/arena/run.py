"""The arena: one measured step, everybody's policy under every budget, and a bout on real steps for each that differs.

describe ─▶ first run (whatever fits) ─▶ policies, without running anything ─▶ one process a bout ─▶ all in turns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from explorer.engine.arena.fight import fight
from explorer.engine.arena.in_turns import timed_in_turns
from explorer.engine.device.apart import apart
from explorer.engine.measure.fits import measure_what_fits
from explorer.engine.model.describe import describe
from explorer.errors import BadInput, Cancelled, Crashed, ExplorerError, ModelFailed, OutOfMemory
from explorer.plan.arena.rival import Rival, Situation
from explorer.plan.arena.table import chosen
from explorer.record.arena import Arena, Bout, Ground
from explorer.record.failure import failure_of
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.progress import Progress, Report, silent
from explorer.record.run import RunSpec


def run_arena(spec: RunSpec, shares: Sequence[float], only: Sequence[str] = (), *, report: Report = silent) -> Arena:
    """Every rival, or those of `only`, under every share of the peak with everything kept.

    Equal policies run once. Who chose one that a run finds over the budget is asked once more, for as much less.
    Raises BadInput for an unknown rival, and what describing and measuring the model raise.
    """
    contestants = chosen(only)
    spec = msgspec.structs.replace(spec, policy=KEEP_ALL, plan=None)
    graph = describe(spec.model, seed=spec.seed, device=spec.device, report=report)
    first = measure_what_fits(spec, _named(report, "first run"))
    if first.failure is not None:
        raise _as_error(first.failure.kind, first.failure.sentence, first.failure.hint)
    situation = Situation(first, graph)
    baseline = situation.forecaster.baseline
    ground = Ground(
        peak_bytes=situation.keep_all_bytes,
        saved_bytes=(baseline.saved_after_forward_bytes if baseline is not None else None) or 0,
        is_measured=not first.spec.policy.units,
    )
    planned = [_planned(name, rival, situation, share) for name, rival, share in _pairs(contestants, shares)]
    bouts: list[Bout] = []
    known: dict[Policy, Bout] = {}
    for i, bout in enumerate(planned):
        rival = contestants[bout.rival]
        run = partial(_fought, spec, ground, report=_within(report, f"{rival.title}{_at(bout.share)}", i, len(planned)))
        fought = _once(bout, known, run)
        again = _asked_again(fought, rival, situation)
        bouts.append(fought if again is None else _once(again, known, run))
    return Arena(
        spec=spec,
        environment=first.environment,
        ground=ground,
        bouts=_timed(spec, bouts, report),
    )


def _pairs(contestants: Mapping[str, Rival], shares: Sequence[float]) -> Iterator[tuple[str, Rival, float | None]]:
    for name, rival in contestants.items():
        for share in shares if rival.takes_budget else (None,):
            yield name, rival, share


def _planned(name: str, rival: Rival, situation: Situation, share: float | None) -> Bout:
    """What it chose and what is foreseen of that, or why it chose nothing."""
    budget = None if share is None else int(share * situation.keep_all_bytes)
    bout = Bout(rival=name, share=share, budget_bytes=budget)
    if rival.choose is None:
        return bout
    try:
        policy = rival.choose(situation, budget or situation.keep_all_bytes)
    except BadInput as error:
        return msgspec.structs.replace(bout, why=error.sentence)
    return _foreseen(bout, policy, situation)


def _asked_again(fought: Bout, rival: Rival, situation: Situation) -> Bout | None:
    """What a rival chooses for as much less as its run was over the budget, as whoever trains would ask it.

    None where its run kept the budget, or where it then chooses the same or finds nothing.
    """
    budget, peak = fought.budget_bytes, fought.step_peak_bytes
    if budget is None or peak is None or peak <= budget or rival.choose is None:
        return None
    try:
        policy = rival.choose(situation, budget - (peak - budget))
    except BadInput:
        return None
    if policy == fought.policy:
        return None
    return _foreseen(Bout(rival=fought.rival, share=fought.share, budget_bytes=budget), policy, situation)


def _foreseen(bout: Bout, policy: Policy, situation: Situation) -> Bout:
    foreseen = situation.forecaster.forecast(policy)
    return msgspec.structs.replace(
        bout,
        policy=policy,
        predicted_peak_bytes=foreseen.step_peak_bytes,
        predicted_time_ratio=foreseen.time_ratio,
    )


def _once(bout: Bout, known: dict[Policy, Bout], run: Callable[[Bout], Bout]) -> Bout:
    """`bout` with the figures of the first that ran its policy, which is noted, or its own where that is itself."""
    if bout.why:
        return bout
    if bout.policy is None:
        return run(bout)
    if bout.policy not in known:
        known[bout.policy] = run(bout)
    return _same_as(known[bout.policy], bout)


def _fought(spec: RunSpec, ground: Ground, bout: Bout, *, report: Report) -> Bout:
    """In a process of its own; how that ended, where it did not end well, is the bout's failure."""
    try:
        fought = apart(fight, spec, bout, ground, report=report, what=f"ran {bout.rival}", limit_s=spec.time_limit_s)
    except Cancelled:
        raise
    except ExplorerError as error:
        return msgspec.structs.replace(bout, failure=failure_of(error, in_step=True))
    if fought is None:
        ended = OutOfMemory("The system ended the step for lack of memory.")
        return msgspec.structs.replace(bout, failure=failure_of(ended, in_step=True))
    return fought


def _timed(spec: RunSpec, bouts: Sequence[Bout], report: Report) -> tuple[Bout, ...]:
    """With times of those that ran under a policy, each policy given as long as a bout. Where taking them ended badly,
    that is their failure."""
    running = [bout for bout in bouts if bout.policy is not None and bout.ran]
    if not running or not spec.n_repeats:
        return tuple(bouts)
    policies = (KEEP_ALL, *(bout.policy for bout in running if bout.policy is not None))
    different = [policy for i, policy in enumerate(policies) if policy not in policies[:i]]
    limit_s = spec.time_limit_s * len(different)
    try:
        times = apart(timed_in_turns, spec, different, report=report, what="timed them", limit_s=limit_s)
        if times is None:
            raise OutOfMemory("The system ended the timed steps for lack of memory.")
    except Cancelled:
        raise
    except ExplorerError as error:
        failure = failure_of(error, in_step=True)
        return tuple(msgspec.structs.replace(bout, failure=failure) if bout in running else bout for bout in bouts)
    return tuple(
        bout.with_times(times[different.index(bout.policy)], times[0]) if bout in running and bout.policy else bout
        for bout in bouts
    )


def _same_as(known: Bout, bout: Bout) -> Bout:
    """The figures of a bout with the same policy, under this one's name and budget."""
    return msgspec.structs.replace(known, rival=bout.rival, share=bout.share, budget_bytes=bout.budget_bytes)


def _as_error(kind: str, sentence: str, hint: str) -> ExplorerError:
    error = {"out of memory": OutOfMemory, "crash": Crashed}.get(kind, ModelFailed)
    return error(sentence, hint=hint)


def _at(share: float | None) -> str:
    return "" if share is None else f" at {100 * share:.0f} %"


def _named(report: Report, name: str) -> Report:
    return lambda progress: report(msgspec.structs.replace(progress, what=f"{name}: {progress.what}"))


def _within(report: Report, where: str, done: int, total: int) -> Report:
    return lambda progress: report(Progress(what=f"{where}: {progress.what}", done=done, total=total))
