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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

import torch
from msgspec.structs import replace
from torch import nn

from explorer.engine.bench.step import forward_backward
from explorer.engine.compare.carried import parameter_differences, state_differences
from explorer.engine.compare.diffs import difference, differences, epsilon_of
from explorer.engine.compare.outcome import (
    EVAL_OUTPUT,
    Outcome,
    Yardsticks,
    float64_distance,
    not_reproducible_because,
    outcome_of,
    reference,
    rng_differences,
    same_gradients,
    same_outcome,
    same_output,
    unequal_state,
    unstable,
)
from explorer.engine.compare.programs import Program, SpecProgram, StepProgram
from explorer.engine.compare.watched import Forwards, RerunDraws, RerunWatch, forward_difference, late_reads
from explorer.engine.compare.without_checkpoint import outcome_without_checkpoint, sides_against
from explorer.engine.state.state_diff import BEYOND, StateKey, leaves, same_state
from explorer.engine.watch.checkpoint_error import failure_in_words
from explorer.errors import Cancelled
from explorer.plan.memory.reruns import checkpoints_itself
from explorer.record.comparison import (
    ROUNDING_FACTOR,
    BufferDiff,
    Comparison,
    ForwardDiff,
    GradientDiff,
    ParameterDiff,
    StateChange,
    TensorDiff,
)
from explorer.record.late_read import Departure

NO_VALUES = "The card is imaginary: its kernels compute no values, so nothing can be compared."
D = TypeVar("D", bound=TensorDiff)
AnyProgram = TypeVar("AnyProgram", SpecProgram, StepProgram)


def judge_programs(
    of: Comparison,
    baseline: AnyProgram,
    candidate: AnyProgram,
    *,
    full: bool = True,
    stage: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """The comparison `of` with the evidence of its verdict. An error of the candidate becomes `failure`.

    `full` False leaves out rerun, float64 reference, further steps and evidence. `stage` is told what runs next.
    Errors of the baseline pass through.
    """
    from explorer.engine.imaginary.run import sees_imaginary_card

    if sees_imaginary_card(of.baseline.spec.device):
        return replace(of, reproducible=False, not_reproducible_because=NO_VALUES)
    stage("baseline, for its gradients")
    baseline.start()
    if isinstance(baseline, SpecProgram) and (lost := baseline.trainee.left_behind):
        return replace(of, reproducible=False, not_reproducible_because=lost)
    base = outcome_of(baseline, full=full)
    of = replace(of, not_walked=_names(_not_walked(base)))
    rerun = exact = None
    unlike = frozenset[StateKey]()
    if full and isinstance(baseline, StepProgram):
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
        return of_departure(of, _departures(candidate)) if isinstance(candidate, StepProgram) else of
    plain = None
    if full and isinstance(baseline, SpecProgram):
        if checkpoints_itself(of.baseline):
            plain = outcome_without_checkpoint(baseline, base)
        of, rerun, unlike = _rerun(of, baseline, base, stage, evaluates=not same_output(base, cand))
        also_in_baseline = {_name(key) for key in baseline.moved_by_backward | unlike}
        of = replace(of, state_changes=tuple(c for c in of.state_changes if _name_of(c) not in also_in_baseline))
    yardsticks = Yardsticks(epsilon_of(base.gradients, baseline.formats), rerun, exact)
    if plain is not None:
        of = replace(of, without_checkpoint=sides_against(plain, (base, cand), yardsticks, unlike))
    return _of_outcomes(of, (baseline, candidate), (base, cand), yardsticks, unlike)


def _with_evidence(
    of: Comparison, programs: tuple[Program, Program], runs: tuple[Outcome, Outcome], stage: Callable[[str], None]
) -> tuple[Comparison, Outcome | None]:
    """`of` with the evidence of further runs, and the outcome of the baseline in float64 if a bit differs."""
    (baseline, candidate), (base, cand), exact = programs, runs, None
    if not same_outcome(base, cand):
        stage("baseline in float64: how far is it from exact?")
        exact, because = reference(baseline, base, evaluates=not same_output(base, cand))
        of = replace(of, reference="float64" if exact else "none", no_reference_because=because)
    if isinstance(baseline, StepProgram) and isinstance(candidate, StepProgram):
        of = _of_steps(of, (baseline, candidate), runs, exact)
    elif isinstance(candidate, SpecProgram) and candidate.spec.policy.units:
        of = _of_recompute(of, candidate, base, stage)
    return of, exact


def _of_recompute(of: Comparison, candidate: SpecProgram, base: Outcome, stage: Callable[[str], None]) -> Comparison:
    """`of` with masks and state changes at recompute, and with a run to the end of each recompute if one drew less.

    Unless the warm-up was watched, a separate step of the candidate is, and is not compared. A run for evidence may
    fail where the candidate did not: the tensors of the candidate decide the verdict without the evidence.
    """
    if not of.masks_watched:
        stage("candidate, watched: masks and module state")
        with suppress(Exception):
            of = _watched(of, candidate)
    if of.late_reads:
        stage("candidate, two steps: what its recomputes read")
        of = replace(of, late_reads=late_reads(candidate.start().trainee))
        candidate.end()
    if candidate.spec.policy.stops_early and any(mask.n_not_drawn_again for mask in of.masks):
        to_the_end = replace(candidate.spec, policy=replace(candidate.spec.policy, early_stop=False))
        program = candidate.under(to_the_end)
        try:
            again = outcome_of(program.start(), full=False, like=base)
            of = replace(of, equal_without_early_stop=same_gradients(base, again))
        except Cancelled:
            raise
        except Exception as error:
            sentence = failure_in_words(error, program.model).sentence
            of = replace(of, equal_without_early_stop=False, fails_without_early_stop=sentence)
    return of


def _watched(of: Comparison, candidate: SpecProgram) -> Comparison:
    """`of` with what a watched step of the candidate shows."""
    candidate.start()
    watch = RerunWatch(candidate.model, candidate.spec.policy)
    with watch:
        forward_backward(candidate.trainee, watch.on_phase)
    candidate.end()
    return watch.added_to(of)


def _rerun(
    of: Comparison, baseline: AnyProgram, base: Outcome, stage: Callable[[str], None], *, evaluates: bool = True
) -> tuple[Comparison, Outcome, frozenset[StateKey]]:
    """`of` with whether the baseline equals itself, the rerun, and the state in which both differ.

    The rerun of a RunSpec comes last, because the timed steps go on from it. That of a user's step comes before the
    float64 run, which needs the types that the rerun shows. If the candidate's output in eval mode, where no policy
    acts, equals the baseline's, the output has been repeated already: the rerun need not evaluate.
    """
    stage("baseline again: does it equal itself?")
    baseline.start()
    with baseline.observed():
        rerun = outcome_of(baseline, like=base, evaluates=evaluates)
    rerun.eval_output = rerun.eval_output if evaluates else base.eval_output
    because, unlike = not_reproducible_because(base, rerun), unstable(base, rerun)
    of = replace(of, reproducible=not because, not_reproducible_because=because, unjudged=_names(unlike))
    return of, rerun if because else base, unlike  # equal outcomes need one copy


def _of_steps(
    of: Comparison, programs: tuple[StepProgram, StepProgram], runs: tuple[Outcome, Outcome], exact: Outcome | None
) -> Comparison:
    """`of` with the evidence that two users' steps leave, the first and `exact` of the baseline."""
    left, right = (program.settings for program in programs)
    pairs = ((key[1], *pair) for key in left for pair in zip(left[key], right.get(key, ())) if pair[0] != pair[1])
    of = replace(of, optimizer_settings=tuple(dict.fromkeys(pairs)))
    if same_gradients(*runs):
        return of
    departures = _departures(programs[1])
    of = replace(of, forward=_forward_difference(*programs), untied=_untied(*programs), departures=departures)
    return replace(of, float64_distance=float64_distance(programs[1], exact, runs[0]) if exact else None)


def of_departure(of: Comparison, departures: tuple[Departure, ...]) -> Comparison:
    """`of`, whose failure also says at which operator the recompute departed from forward."""
    if of.failure is None or not departures:
        return of
    sentence = f"{of.failure.sentence} {departures[0].sentence}"
    return replace(of, departures=departures, failure=replace(of.failure, sentence=sentence))


def _departures(program: StepProgram) -> tuple[Departure, ...]:
    """Where recomputes of a user's step depart from forward, from one watched step; empty for a compiled program."""
    if _is_compiled(program):
        return ()
    draws = RerunDraws(program.model)
    with suppress(Exception):  # the step may fail as it did before: what was seen until then counts
        program.start()
        with draws:
            program.step(program.model, program.batches["batch"])
    return tuple(draws.departures.by_block.values())


def _is_compiled(program: StepProgram) -> bool:
    modules = list(program.model.modules())
    return any(hasattr(thing, "_torchdynamo_orig_callable") for thing in (program.step, *modules)) or any(
        module._compiled_call_impl is not None for module in modules
    )


def _forward_difference(*programs: StepProgram) -> ForwardDiff | None:
    """The forward difference, from one watched step of each; None if a program is compiled or fails."""
    sides = []
    for program in programs:
        if _is_compiled(program):
            return None
        forwards = Forwards(program.model)
        try:
            program.start()
            with forwards.watching():
                program.step(program.model, program.batches["batch"])
        except Exception:  # a hook may fail in a compiled or sharded model: the verdict does not need this evidence
            return None
        sides.append(forwards)
    return forward_difference(*sides)


def _untied(*programs: StepProgram) -> tuple[str, ...]:
    """Names that share a parameter in one program alone."""
    ties: list[set[frozenset[str]]] = []
    for program in programs:
        names_of: dict[nn.Parameter, set[str]] = defaultdict(set)
        for name, parameter in program.named().items():
            names_of[parameter].add(name)
        ties.append({frozenset(names) for names in names_of.values() if len(names) > 1})
    return tuple(sorted({name for names in ties[0] ^ ties[1] for name in names}))


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
    programs: tuple[Program, Program],
    runs: tuple[Outcome, Outcome],
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
    if foreign:
        for outcome in runs:
            outcome.buffers = {key: value for key, value in outcome.buffers.items() if key not in _names(foreign)}
    gradients, of_inputs, later = (
        differences(GradientDiff, getattr(base, family), getattr(cand, family), yardsticks.of(family))
        for family in ("gradients", "input_gradients", "later_gradients")
    )
    twice = set(map(_name_of, of.state_changes))
    nothing_rounds = all(diff.bitwise for diff in (*gradients, *of_inputs, *later))
    finer_than = yardsticks.epsilon if nothing_rounds else None
    buffers = differences(BufferDiff, base.buffers, cand.buffers, yardsticks.of("buffers"))
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
