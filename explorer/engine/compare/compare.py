"""Measures a baseline and a candidate in turns, and judges whether their steps are equal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress

from msgspec.structs import replace

from explorer.engine.bench.bench import BegunSteps
from explorer.engine.bench.measure import Meter, Session, n_reports
from explorer.engine.bench.recording import FurtherSteps, under_tracker
from explorer.engine.bench.step import OnPhase, Trainee, forward_backward, prepare, refuse_other_settings
from explorer.engine.compare.judgement import judge_programs, of_departure
from explorer.engine.compare.probe import ProbeResult, probe
from explorer.engine.compare.spec_program import SpecProgram
from explorer.engine.compare.watched import RerunWatch
from explorer.engine.device.memory_limit import without_page_faults
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state, tf32_kinds, without_tf32
from explorer.engine.watch.scopes import BlockWatch
from explorer.plan.hazards.hazards import hazards
from explorer.plan.why.gradients import causes
from explorer.record.comparison import Comparison
from explorer.record.graph import Hazard
from explorer.record.plan import Progress, Report, silent
from explorer.record.run import RunSpec

_N_STAGES = 4


def compare(baseline: RunSpec, candidate: RunSpec, *, full: bool = True, report: Report = silent) -> Comparison:
    """Measures both runs and compares their gradients, buffers, parameters and generators.

    `full` False leaves out rerun, float64 reference, further steps, masks and state audit. The failure of a run is a
    result: `failure` gives the reason beside both measurements.
    Raises BadInput if the specs differ in more than policy and plan, and what loading the model raises.
    """
    refuse_other_settings(baseline, candidate)
    is_split = baseline.plan is not None or candidate.plan is not None
    probes = full and not is_split and not baseline.forward_only and bool(candidate.policy.units and baseline.n_probes)
    n_steps = 1 + probes + n_reports((baseline, candidate)) + _N_STAGES
    probing = Progress(what="checking the blocks for hidden state", done=0, total=n_steps)
    meter, probed = Meter(report, n_steps), ProbeResult()
    if probes:
        meter(probing.what)
        probed = probe(baseline, candidate, lambda of_process: report(probing))
    with preserve_global_state(), without_page_faults():
        meter("loading the model")
        loaded = load_for(baseline)
        program = SpecProgram(baseline, loaded)  # before any step, for it restores what steps of all copies share
        session = Session((baseline, candidate), loaded, meter)
        watches: list[RerunWatch] = []

        # The warm-up of the candidate then shows masks and state, and the judged steps show the peaks.
        saves_steps = full and _as_in_training(candidate) and candidate.memory_limit_bytes is None
        program.peak.is_read = not saves_steps

        def watch(trainee: Trainee) -> tuple[BlockWatch, OnPhase]:
            if trainee.spec is not candidate or not saves_steps or not candidate.policy.units:
                return under_tracker(trainee)
            watches.append(RerunWatch(trainee.model, candidate.policy))
            return watches[-1], watches[-1].on_phase

        session.record(further=FurtherSteps(watch, alone=not saves_steps))
        comparison, begun = _with_departure(_recorded(session), watches), None
        if comparison.failure is None:
            meter.part(comparison)
            if baseline.device == "cuda":
                comparison = replace(comparison, without_tf32=tf32_kinds())
            if watches:
                comparison = watches[-1].added_to(comparison)
            watches.clear()
            comparison, begun = _judged(comparison, program, probed, full=full, stage=meter)
            meter.part(comparison)
        del program
        session.time(begun)
    timed = _recorded(session)
    if timed.failure is not None:
        return _with_departure(timed, watches)
    return replace(comparison, baseline=timed.baseline, candidate=timed.candidate)


def _judged(
    of: Comparison, program: SpecProgram, probed: ProbeResult, *, full: bool, stage: Callable[[str], None]
) -> tuple[Comparison, BegunSteps | None]:
    """`of` with its evidence, and the judged steps if they ran as timed steps do."""
    spec, candidate = of.baseline.spec, program.under(of.candidate.spec)
    candidate.peak.is_read = program.peak.is_read
    as_in_training = _as_in_training(spec)
    kernels = nullcontext() if as_in_training else deterministic_kernels(strict=runs_strictly(spec))
    with kernels, without_tf32():
        judged = judge_programs(of, program, candidate, full=full, stage=stage)
    sides, begun, trainee = (program, candidate), None, program.observed_trainee
    if as_in_training and trainee is not None:
        begun = BegunSteps(trainee, [side.readings for side in sides], [side.peak.n_bytes for side in sides])
    return with_causes(probed.added_to(judged)), begun


def _as_in_training(spec: RunSpec) -> bool:
    """Whether judged steps run as in training: on one thread of a CPU every kernel is deterministic."""
    return spec.device == "cpu" and spec.n_threads == 1


def _recorded(session: Session) -> Comparison:
    """Both runs. The failure of the baseline, else of the candidate, names its run."""
    baseline, candidate = session.runs
    failure = None
    for name, run in (("candidate", candidate), ("baseline", baseline)):
        if run.failure is not None:
            failure = replace(run.failure, sentence=f"In the {name}: {run.failure.sentence}")
    return Comparison(baseline=baseline, candidate=candidate, failure=failure)


def _with_departure(comparison: Comparison, watches: list[RerunWatch]) -> Comparison:
    return of_departure(comparison, tuple(d for watch in watches for d in watch.departures.by_block.values()))


def with_causes(comparison: Comparison) -> Comparison:
    """The comparison with likely causes: findings of the probe, and hazards of a candidate that differs."""
    spec, fired = comparison.candidate.spec, tuple[Hazard, ...]()
    if comparison.verdict in ("different", "state moved") and spec.policy.units:
        with suppress(Exception):  # a model that runs may fail to be described: causes then lack hazards
            graph = describe(spec.model, seed=spec.seed, device=spec.device, conditions=spec.conditions)
            fired = hazards(graph, spec.policy, spec=spec)
    hidden = [
        f"{block} leaves another step behind after {comparison.n_probes} more runs: it remembers its calls "
        "where no list looks (a file, an installed package, an iterator). Ask "
        "explorer.is_recomputing() before that state moves."
        for block in comparison.hidden_state
    ]
    return replace(comparison, causes=(*hidden, *causes(comparison, fired)))


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
