"""The one judgement of two programs: the order of their runs, and every difference of their outcomes.

    baseline ─▶ candidate ─▶ baseline in float64 ─▶ candidate, watched ─▶ baseline again
                             └ rounding             └ masks, state        └ noise floor

Float64 runs if a bit differs, and the watched step if no earlier step was watched.
Gradients, buffers and parameters are compared tensor by tensor; state that a model carries to its next step, leaf by
leaf. Tensors and floats are compared with float64, other values must be equal. An attribute in which two runs of the
baseline differ (an address, a clock) is left out and named.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import torch
from msgspec.structs import replace
from torch.nn.modules.module import register_module_forward_pre_hook

from explorer.engine.compare.carried import parameter_differences, state_differences
from explorer.engine.compare.diffs import difference, differences, epsilon_of
from explorer.engine.compare.outcome import (
    EVAL_OUTPUT,
    Yardsticks,
    not_reproducible_because,
    outcome_of,
    reference,
    rng_differences,
    same_outcome,
    same_output,
    unequal_state,
    unstable,
)
from explorer.engine.compare.programs import JudgedProgram, Outcome, Outcomes, Stage
from explorer.engine.policy.apply import SWITCHES, checkpointing_off
from explorer.engine.state.state_diff import BEYOND, StateKey, leaves, same_state
from explorer.engine.watch.checkpoint_error import failure_in_words
from explorer.errors import Cancelled
from explorer.plan.memory.reruns import checkpoints_itself
from explorer.record.checkpointing import WithoutCheckpoint
from explorer.record.comparison import (
    ROUNDING_FACTOR,
    BufferDiff,
    Comparison,
    GradientDiff,
    ParameterDiff,
    StateChange,
    TensorDiff,
)
from explorer.record.late_read import Departure

NO_VALUES = "The card is imaginary: its kernels compute no values, so nothing can be compared."
D = TypeVar("D", bound=TensorDiff)
AnyProgram = TypeVar("AnyProgram", bound=JudgedProgram)


def judge_programs(
    of: Comparison,
    baseline: AnyProgram,
    candidate: AnyProgram,
    *,
    full: bool = True,
    stage: Stage = lambda what: None,
) -> Comparison:
    """The comparison `of` with the evidence of its verdict. An error of the candidate becomes `failure`.

    `full` False leaves out rerun, float64 reference, further steps and evidence. `stage` is told what runs next.
    Errors of the baseline pass through.
    """
    from explorer.engine.imaginary.seen import sees_imaginary_card

    if sees_imaginary_card(of.baseline.spec.device):
        return replace(of, reproducible=False, not_reproducible_because=NO_VALUES)
    if baseline.as_baseline.outcome is None:
        stage("baseline, for its gradients")
        baseline.start()
        if baseline.left_behind:
            return replace(of, reproducible=False, not_reproducible_because=baseline.left_behind)
        baseline.as_baseline.outcome = outcome_of(baseline, full=full)
    base = baseline.as_baseline.outcome
    of = replace(of, not_walked=_names(_not_walked(base)))
    rerun = exact = None
    unlike = frozenset[StateKey]()
    if full and baseline.rerun_is_first:
        of, rerun, unlike = _rerun(of, baseline, base, stage)
    stage("candidate, for its gradients")
    try:
        cand = outcome_of(candidate.start(), full=full, lead=base)
        if full:
            of, exact = _with_evidence(of, (baseline, candidate), (base, cand), stage)
    except Cancelled:
        raise
    except Exception as error:  # a user's model may raise anything when it runs again
        of = replace(of, failure=failure_in_words(error, candidate.model))
        return of_departure(of, candidate.departures())
    plain = _without_checkpoint(baseline, base) if full and checkpoints_itself(of.baseline) else None
    if full and not baseline.rerun_is_first:
        of, rerun, unlike = _rerun(of, baseline, base, stage, evaluates=not same_output(base, cand))
    also_in_baseline = {_name(key) for key in baseline.moved_by_backward | unlike}
    of = replace(of, state_changes=tuple(c for c in of.state_changes if _name_of(c) not in also_in_baseline))
    yardsticks = Yardsticks(epsilon_of(base.gradients, baseline.formats), rerun, exact)
    if plain is not None:
        of = replace(of, without_checkpoint=_sides_against(plain, (base, cand), yardsticks, unlike))
    return _of_outcomes(of, (baseline, candidate), (base, cand), yardsticks, unlike)


def _with_evidence(
    of: Comparison, programs: tuple[AnyProgram, AnyProgram], runs: Outcomes, stage: Stage
) -> tuple[Comparison, Outcome | None]:
    """`of` with the evidence of further runs, and the outcome of the baseline in float64 if a bit differs."""
    (baseline, candidate), (base, cand), exact = programs, runs, None
    if not same_outcome(base, cand):
        if baseline.as_baseline.reference is None:
            stage("baseline in float64: how far is it from exact?")
            baseline.as_baseline.reference = reference(baseline, base, evaluates=not same_output(base, cand))
        exact, because = baseline.as_baseline.reference
        of = replace(of, reference="float64" if exact else "none", no_reference_because=because)
    return candidate.further_evidence(of, baseline, runs, exact, stage), exact


def _rerun(
    of: Comparison, baseline: JudgedProgram, base: Outcome, stage: Stage, *, evaluates: bool = True
) -> tuple[Comparison, Outcome, frozenset[StateKey]]:
    """`of` with whether the baseline equals itself, the rerun, and the state in which both differ.

    The rerun of a RunSpec comes last, because the timed steps go on from it. That of a user's step comes before the
    float64 run, which needs the types that the rerun shows. If the candidate's output in eval mode, where no policy
    acts, equals the baseline's, the output has been repeated already: the rerun need not evaluate.
    """
    if baseline.as_baseline.rerun is None:
        stage("baseline again: does it equal itself?")
        baseline.start()
        with baseline.observed():
            rerun = outcome_of(baseline, like=base, evaluates=evaluates)
        if not evaluates:
            rerun.eval_output = base.eval_output
        because = not_reproducible_because(base, rerun)
        other = rerun if because else base  # equal outcomes need one copy
        baseline.as_baseline.rerun = because, other, unstable(base, rerun)
    because, rerun, unlike = baseline.as_baseline.rerun
    of = replace(of, reproducible=not because, not_reproducible_because=because, unjudged=_names(unlike))
    return of, rerun, unlike


def _without_checkpoint(baseline: JudgedProgram, base: Outcome) -> Outcome | None:
    """The outcome of the step without policy and own checkpoints: the third side of a comparison.

    Baseline and candidate both contain the model's own checkpoints. A difference of the two does not show which side is
    wrong, and two sides that are wrong alike show no difference.
    None if the step fails, blocks still run again, or the program is a user's step.
    """
    program = baseline.without_policy()
    if program is None:
        return None
    program.start()
    reruns: list[str] = []

    def look(module: torch.nn.Module, args: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            reruns.append(type(module).__name__)

    try:
        with checkpointing_off(program.model), register_module_forward_pre_hook(look):
            outcome = outcome_of(program, lead=base, evaluates=False)
    except Exception:  # the verdict does not need this evidence
        return None
    return None if reruns else outcome


def _sides_against(
    plain: Outcome, runs: Outcomes, yardsticks: Yardsticks, unjudged: frozenset[StateKey]
) -> WithoutCheckpoint:
    """The names in which baseline and candidate differ from `plain` by more than rounding."""
    left_out = {key for state in plain.states for key in state if key[1] in SWITCHES} | unjudged
    names = [dict.fromkeys(_differing(plain, run, yardsticks, left_out)) for run in runs]
    base = runs[0].gradients
    lost = tuple(name for name, gradient in plain.gradients.items() if gradient is not None and base.get(name) is None)
    return WithoutCheckpoint(baseline=tuple(names[0]), candidate=tuple(names[1]), lost=lost)


def _differing(plain: Outcome, run: Outcome, yardsticks: Yardsticks, left_out: Collection[StateKey]) -> Iterator[str]:
    diffs: list[TensorDiff] = [
        *differences(GradientDiff, plain.gradients, run.gradients, yardsticks.of("gradients")),
        *differences(BufferDiff, plain.buffers, run.buffers, yardsticks.of("buffers")),
        *state_differences(plain, run, yardsticks, left_out),
    ]
    yield from (diff.name for diff in diffs if diff.verdict == "different")


def of_departure(of: Comparison, departures: tuple[Departure, ...]) -> Comparison:
    """`of`, whose failure also says at which operator the recompute departed from forward."""
    if of.failure is None or not departures:
        return of
    sentence = f"{of.failure.sentence} {departures[0].sentence}"
    return replace(of, departures=departures, failure=replace(of.failure, sentence=sentence))


def _not_walked(outcome: Outcome) -> Iterator[StateKey]:
    """Attributes whose copy is incomplete, because the walk reached a limit."""
    for key, value in (outcome.states[-1] if outcome.states else {}).items():
        if any(part == BEYOND for _, part in leaves(value) if isinstance(part, str)):
            yield key


def _name(key: StateKey) -> str:
    """Such as `blocks.0.step`."""
    return f"{key[0]}.{key[1]}".lstrip(".")


def _name_of(change: StateChange) -> str:
    return _name((change.block, change.name, change.kind))


def _names(keys: Iterable[StateKey]) -> tuple[str, ...]:
    return tuple(sorted(map(_name, keys)))


def _of_outcomes(
    of: Comparison,
    programs: tuple[JudgedProgram, JudgedProgram],
    runs: Outcomes,
    yardsticks: Yardsticks,
    unlike: frozenset[StateKey],
) -> Comparison:
    """`of` with every difference of the outcomes, tensor by tensor."""
    base, cand = runs
    starts = [program.initial_state for program in programs]
    foreign = {*unequal_state(*starts), *(starts[0].keys() ^ starts[1].keys())}  # of the code, not of training
    moved = {
        key for start, outcome in zip(starts, runs) for key in foreign & start.keys()
        if any(not same_state(start[key], state.get(key)) for state in outcome.states)
    }  # fmt: skip
    own_buffers = [outcome.buffers for outcome in runs]
    if foreign:
        left_out = _names(foreign)
        own_buffers = [{key: value for key, value in each.items() if key not in left_out} for each in own_buffers]
    gradients, of_inputs, later = (
        differences(GradientDiff, getattr(base, family), getattr(cand, family), yardsticks.of(family))
        for family in ("gradients", "input_gradients", "later_gradients")
    )
    twice = set(map(_name_of, of.state_changes))
    nothing_rounds = all(diff.bitwise for diff in (*gradients, *of_inputs, *later))
    finer_than = yardsticks.epsilon if nothing_rounds else None
    buffers = differences(BufferDiff, own_buffers[0], own_buffers[1], yardsticks.of("buffers"))
    carried = state_differences(base, cand, yardsticks, unlike | foreign)
    parameters = parameter_differences(base, cand, yardsticks, (*gradients, *later))
    return replace(
        of,
        gradients=gradients,
        input_gradients=of_inputs,
        later_gradients=later,
        buffers=_with_reasons(twice, finer_than, buffers),
        parameters=_with_reasons((), finer_than, parameters),
        n_steps=base.n_steps,
        trains_in_backward=bool(base.trained & base.moved.keys()),
        rng=rng_differences(base, cand),
        eval_output=_eval_difference(base, cand, yardsticks),
        loss_equal=None if base.loss is None or cand.loss is None else base.loss == cand.loss,
        carried=_with_reasons(twice, finer_than, carried),
        n_carried=max((len(state.keys() - (unlike | foreign)) for state in base.states), default=0),
        unjudged=_names(unlike | moved),
    )


def _with_reasons(moved_twice: Collection[str], finer_than: float | None, diffs: tuple[D, ...]) -> tuple[D, ...]:
    """`diffs` of state, with the reasons why a difference is no rounding; TensorDiff.verdict decides by them.

    `finer_than`: epsilon of a run whose gradients are all equal; None for any other run. Under autocast the baseline's
    state is far from float64. With equal gradients, that distance explains nothing.
    """

    def reason(diff: TensorDiff) -> str:
        if diff.name in moved_twice:
            return "A recompute moved it a second time."
        if finer_than is None or diff.candidate_error is None or (isinstance(diff, ParameterDiff) and diff.trained):
            return diff.never_rounds
        epsilon = max(torch.finfo(getattr(torch, diff.dtype)).eps, torch.finfo(torch.float32).eps)
        far = math.inf if diff.relative_norm is None else diff.relative_norm
        if epsilon < finer_than and far > ROUNDING_FACTOR * epsilon:
            return f"All gradients are equal, and {diff.dtype} rounds less than this difference."
        return diff.never_rounds

    return tuple(diff if diff.bitwise else replace(diff, never_rounds=reason(diff)) for diff in diffs)


def _eval_difference(baseline: Outcome, candidate: Outcome, yardsticks: Yardsticks) -> TensorDiff | None:
    left, right = baseline.eval_output, candidate.eval_output
    if left is None and right is None:
        return None
    scales = ({EVAL_OUTPUT: run.eval_output} if run else {} for run in (yardsticks.rerun, yardsticks.exact))
    return difference(TensorDiff, EVAL_OUTPUT, left, right, yardsticks.yardstick(*scales))
