"""Why gradients or state of a candidate differ, computed from the evidence of the comparison.

For two programs the pattern of the differing tensors is read too: where forward parts, or from where on backward does.
Each rule says what was computed, and beside it what usually causes it.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from explorer.plan.names import is_within, listed
from explorer.record.comparison import Comparison, ParameterDiff, StateChange, TensorDiff
from explorer.record.graph import Hazard

D = TypeVar("D", bound=TensorDiff)
_BACKWARD = "a detach or no_grad, a hook, a backward written by hand, a recompute that is not what forward was"
_LOSS = "shifted targets, padding that counts, smoothing, a term that is missing, another reduction"
_AFTER = "gradients that were not zeroed, are clipped or scaled otherwise, or come from a part of the batch"


def patterns(comparison: Comparison) -> Iterator[str]:
    """Sentences of two programs whose first gradients differ; none where forward was not watched."""
    if comparison.untied:
        yield f"{listed(comparison.untied)} are one parameter in one of the two programs alone: a tie is broken."
    forward = comparison.forward
    first, later = _different(comparison.gradients), _different(comparison.later_gradients)
    if later and not first and not comparison.candidate.spec.policy.units:
        yield (
            "The gradients of the first step are the same and those of a later step are not: something is left from "
            "the step before. Usual causes: gradients that were not zeroed, state that the step moves."
        )
    if first and _only_rounds_more(comparison):
        yield from _coarser(comparison)
        return
    if forward is None or not first:
        return
    if forward.n_calls[0] != forward.n_calls[1]:
        n_base, n_other = forward.n_calls
        yield (
            f"The model is called {_times(n_base)} in a step of the baseline and {_times(n_other)} in the candidate's. "
            "Usual causes: other microbatches, and a divisor or a mean that does not fit them."
        )
    elif forward.block is not None:
        yield _parts(comparison)
    elif forward.other_inputs and not forward.same:
        yield (
            "The model gets other inputs in the candidate's step. Usual causes: another order of samples, a "
            "normalisation or an augmentation, a padding, a token that is shifted."
        )
    elif forward.same and forward.n_compared and comparison.loss_equal is False:
        yield f"The model returns the same and the loss is another. Usual causes: {_LOSS}."
    elif forward.same and forward.n_compared:
        yield from _in_backward(comparison, forward.order)


def _different(diffs: Iterable[D]) -> list[D]:
    return [diff for diff in diffs if diff.verdict == "different"]


def _names(diffs: Iterable[TensorDiff]) -> list[str]:
    return [diff.name for diff in diffs]


def _only_rounds_more(comparison: Comparison) -> bool:
    """Whether both programs agree in float64 in every tensor that differs."""
    wrong = _different(comparison.all_diffs)
    attributes = [diff for diff in comparison.carried if diff.kind != "buffer"]
    covered = all(diff.presence == "both" and diff not in attributes for diff in wrong)
    distance = comparison.float64_distance
    return covered and distance is not None and distance < _EQUAL_IN_FLOAT64


def _coarser(comparison: Comparison) -> Iterator[str]:
    """The programs agree in float64: which arithmetic they do not share."""
    forward = comparison.forward
    yield (
        f"In float64 the gradients of both are the same, to {comparison.float64_distance:.0e} of a norm: the "
        "candidate computes the same thing and rounds more. Usual causes: autocast, other kernels, another order of "
        "sums, numbers near overflow."
    )
    if forward and forward.laid_out:
        block, *strides = forward.laid_out
        yield (
            f"{block or 'The model'} is the first block whose input lies in another order of memory: strides "
            f"{strides[0]} in the baseline and {strides[1]} in the candidate. Torch's channels_last BatchNorm on the "
            "CPU rounds up to 90 times more."
        )


def _parts(comparison: Comparison) -> str:
    forward = comparison.forward
    assert forward is not None
    where = forward.block or "The model"
    what = ". Usual causes: a mask, a scale, a dimension, a number format inside it."
    if forward.in_baseline != forward.in_candidate:
        what = f": it is {forward.in_baseline} in the baseline and {forward.in_candidate} in the candidate."
    return f"{where} is the first block that returns another output for the same input{what}"


def _in_backward(comparison: Comparison, order: tuple[str, ...]) -> Iterator[str]:
    """Forward is the same: which gradients are not."""
    places = {fqn: i for i, fqn in enumerate(order)}
    came = [diff for diff in comparison.gradients if diff.presence != "neither"]
    ordered = [diff for diff in came if diff.name.rpartition(".")[0] in places]
    ordered.sort(key=lambda diff: places[diff.name.rpartition(".")[0]])
    wrong = _different(ordered)
    if not any(diff.presence == "both" for diff in wrong):  # `_missing` names them
        return
    behind = ordered[ordered.index(wrong[-1]) + 1 :]
    begin, usual = "The model returns the same", f"{_LOSS}, "
    if comparison.loss_equal:
        begin, usual = f"{begin} and the loss is equal", ""
    if len(wrong) == 1 and len(came) > 1:
        yield f"{begin}; the gradient of {wrong[0].name} alone differs. Usual causes: {usual}{_BACKWARD}."
    elif behind:
        yield (
            f"{begin}; backward is the same down to {behind[0].name}, and {len(wrong)} of the "
            f"{len(ordered) - len(behind)} gradients before it differ, {wrong[-1].name} first. "
            f"Usual causes: {usual}{_BACKWARD}."
        )
    elif not comparison.untied and all(diff.presence == "both" for diff in came):  # else clipping follows from it
        yield (
            f"{begin}; {len(wrong)} of {len(came)} gradients differ, that of the last block among them. "
            f"Usual causes: {usual}{_AFTER}."
        )


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


_EQUAL_IN_FLOAT64 = 1e-10
"""Two programs of the same mathematics are nearer than this share of the gradients' norm in float64."""
_STRAIGHT = 1e-4
"""Tolerance of a cosine or a ratio around one; larger than rounding of float32."""
_MEANT = 0.01
"""Least distance from one of a factor that a program forgot."""
_HALF_DIGIT = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}
"""Largest relative error of rounding to a type."""
_MOST_LOST = 0.2
"""Share of a step that rounding may take if the step's direction is to count."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def causes(comparison: Comparison, fired: Sequence[Hazard] = ()) -> tuple[str, ...]:
    """Likely causes of a difference, most likely first, each one sentence; empty where nothing differs.

    `fired` are the hazards of the candidate, which were known before it ran.
    """
    if comparison.verdict in ("bitwise equal", "not comparable"):
        return tuple(_nonfinite(comparison))
    causes_seen = [*_masks(comparison), *_generators(comparison), *_missing(comparison), *_scaled(comparison)]
    causes_seen += [*patterns(comparison), *_state(comparison), *_late_reads(comparison)]
    causes_seen += _nonfinite(comparison)
    causes_seen += _hazards(comparison, fired, " ".join(causes_seen))
    departures = [departure.sentence for departure in comparison.departures[:1]]
    return (*(causes_seen or _what_is_left(comparison)), *_settings(comparison), *departures)


_MOST_READS = 3
"""Values read late that are said one by one."""


def _late_reads(comparison: Comparison) -> Iterator[str]:
    """The value itself is the evidence: this step may be equal, and a later one is not."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    changed = {(change.block, change.name) for change in comparison.state_changes}
    for read in comparison.late_reads:
        if (read.owner, read.name) in changed:
            continue
        groups.setdefault((read.name, read.in_recompute, read.in_forward), []).append(read.block)
    for (name, in_recompute, in_forward), blocks in list(groups.items())[:_MOST_READS]:
        where = listed(sorted(set(blocks)))
        yield (
            f"The recompute of {where} reads {name} {in_recompute}, forward read {in_forward}: the value changed "
            "between forward and backward. Change it after the step, or hand it to the block as an argument."
        )


def _masks(comparison: Comparison) -> Iterator[str]:
    policy = comparison.candidate.spec.policy
    off = "" if policy.preserve_rng_state else ": preserve_rng_state is off"
    for is_mask, what in ((True, "The dropout mask differs"), (False, "The random numbers differ")):
        wrong = [mask for mask in comparison.masks if mask.n_mismatched and mask.is_mask is is_mask]
        if wrong:
            worst = max(mask.mismatch_share for mask in wrong)
            where = listed([mask.block for mask in wrong])
            yield f"{what} in {where} between forward and recompute, in up to {100 * worst:.0f} % of the elements{off}."
    left_out = [mask.block for mask in comparison.masks if mask.n_not_drawn_again]
    if not left_out or any(unit.action != "recompute" for unit in policy.units):
        return
    where = f"{listed(left_out)} drew in forward and not again"
    if policy.stops_early and comparison.equal_without_early_stop:
        yield f"{where}: early stop ended the recompute before. With early_stop off all gradients are equal."
    elif comparison.fails_without_early_stop:
        yield f"{where}. With early_stop off the step fails: {comparison.fails_without_early_stop}"
    elif not policy.stops_early:
        yield f"{where}, though the recompute runs to its end. Usual causes: eval() before backward, another branch."


def _hazards(comparison: Comparison, fired: Sequence[Hazard], causes_seen: str) -> Iterator[str]:
    """Hazards of a block or a unit that differs, unless a cause with evidence names the block.

    A block without a tensor that was compared (a shared queue, say) differs in the blocks around it alone. That a dry
    rerun departs names no cause, so it comes last.
    """
    names, wrong = _names(comparison.all_diffs), _names(_different(comparison.all_diffs))
    for hazard in sorted(fired, key=lambda hazard: hazard.rule == "departs"):
        blocks = [block for block in hazard.blocks if not re.search(rf"(?<![\w.]){re.escape(block)}\b", causes_seen)]
        around = [*blocks, *(unit for unit in comparison.candidate.spec.policy.blocks for block in blocks
                             if is_within(block, unit))]  # fmt: skip
        differs = any(is_within(name, *around) for name in wrong)
        unseen = wrong and any(not any(is_within(name, block) for name in names) for block in blocks)
        if hazard.severity != "note" and (differs or unseen):
            yield f"Known before the run: {hazard.sentence}"


def _generators(comparison: Comparison) -> Iterator[str]:
    default, others = list[str](), list[str]()
    for diff in comparison.rng:
        if not diff.equal:
            (default if diff.generator.startswith("torch ") else others).append(diff.generator)
    if others:
        yield (
            f"The recompute drew from {listed(others)} again: torch does not set this generator back, restore_rng does."
        )
    if default:
        yield f"The generator {listed(default)} stands elsewhere after the step: later steps draw other numbers."


def _missing(comparison: Comparison) -> Iterator[str]:
    if alone := [diff.name for diff in comparison.gradients if diff.presence == "candidate only"]:
        yield (
            f"{listed(alone)} {'has' if len(alone) == 1 else 'have'} a gradient in the candidate alone. An optimizer "
            "skips a parameter without a gradient; weight decay and momentum move one whose gradient is zero."
        )
    gone = [diff.name for diff in comparison.gradients if diff.presence == "baseline only"]
    if not gone:
        return
    why = ""
    if comparison.forward is not None:
        why = (
            ". Usual causes: a detach or no_grad, requires_grad that is off, a reentrant checkpoint whose inputs "
            "require none"
        )
    if comparison.candidate.spec.policy.use_reentrant:
        why = ": reentrant checkpointing passes no gradient where no input requires one, or none is in plain sight"
    yield f"No gradient came for {listed(gone)}{why}."


def _scaled(comparison: Comparison) -> Iterator[str]:
    """Gradients of the right direction and the wrong length, all by one factor."""
    wrong = _different(comparison.gradients)
    ratios = [diff.norm_ratio for diff in wrong if diff.norm_ratio and diff.cosine and diff.cosine > 1 - _STRAIGHT]
    if not ratios or len(ratios) < len(wrong):
        return
    factor = statistics.median(ratios)
    if max(ratios) - min(ratios) < _STRAIGHT * factor and abs(factor - 1) > _MEANT:
        which = f"{len(wrong)} of {comparison.n_gradients} gradients ({listed(_names(wrong))})"
        yield f"{which} are {factor:.4g} times the baseline's, in the same direction: a divisor, a scale, a sum."


def _state(comparison: Comparison) -> Iterator[str]:
    changes: dict[tuple[str, str], list[StateChange]] = defaultdict(list)
    statistics: list[StateChange] = []
    for change in comparison.state_changes:
        (statistics if change.name in STATISTICS else changes[change.name, change.kind]).append(change)
    if statistics:
        where = listed(_blocks(statistics))
        yield f"Running statistics moved twice in {where}: once in forward, once in the recompute."
    yield from _carried(comparison)
    for (name, kind), same in changes.items():
        example = f"{same[0].after_forward} → {same[0].after_backward}"
        yield f"The recompute changed the {kind} {name} of {listed(_blocks(same))} a second time ({example})."


def _carried(comparison: Comparison) -> Iterator[str]:
    """State that differs after the step without a recorded change in backward: parameters, hooks, later steps."""
    changed = {f"{change.block}.{change.name}".lstrip(".") for change in comparison.state_changes}
    parameters = [diff for diff in comparison.parameters if not diff.trained]
    wrong = _names(_different((*comparison.carried, *parameters)))
    if names := [name for name in dict.fromkeys(wrong) if name not in changed]:
        verb = "is" if len(names) == 1 else "are"
        yield f"After the step {listed(names)} of the candidate {verb} not what the baseline's {verb}."


def _nonfinite(comparison: Comparison) -> Iterator[str]:
    both = [diff.name for diff in comparison.gradients if diff.bitwise and diff.n_nonfinite]
    if both:
        yield f"NaN or infinity stands in {listed(both)} of both runs, where any error would be absorbed."
    single = [diff.name for diff in comparison.gradients if diff.n_nonfinite_mismatch]
    single = single or [diff.name for diff in comparison.all_diffs if diff.n_nonfinite_mismatch]
    if single:
        yield f"NaN or infinity stands in {listed(single)} where the other run is finite."


def _what_is_left(comparison: Comparison) -> Iterator[str]:
    """Sentences without a cause: the checks that found equality, and the checks that were not made."""
    if comparison.verdict == "rounding" and comparison.candidate.spec.policy.use_reentrant:
        yield "Reentrant checkpointing runs forward without gradients, where torch may choose other kernels."
    elif comparison.verdict == "different":
        two = "Forward and recompute" if comparison.candidate.spec.policy.units else "The two"
        optimizers = list(_only_optimizer(comparison))
        yield from optimizers or [f"{_looked_at(comparison)} {two} differ by something that none of these shows."]
        yield from _last_recomputed(comparison)
    if comparison.no_reference_because and comparison.verdict == "different":
        yield f"Rounding cannot be told from wrong here. {comparison.no_reference_because}"


def _last_recomputed(comparison: Comparison) -> Iterator[str]:
    """The recomputed block with the last gradient that differs: backward computes it first."""
    came = [diff for diff in comparison.gradients if diff.presence != "neither"]
    wrong = _names(_different(came))
    blocks = [block for block in comparison.candidate.spec.policy.blocks if wrong and is_within(wrong[-1], block)]
    if blocks:
        n_after = len(came) - 1 - _names(came).index(wrong[-1])
        after = f"; the {_n(n_after, 'gradient')} after it are equal" if n_after > 1 else ""
        yield (
            f"Look first at the recompute of {max(blocks, key=len) or 'the model'}. In the model's order {wrong[-1]} "
            f"is the last gradient that differs{after}. Usual causes: a global or a weight that changes between "
            "forward and backward, a backward written by hand, parameters of functional_call, another thread."
        )


def _only_optimizer(comparison: Comparison) -> Iterator[str]:
    """Equal gradients and unequal parameters."""
    gradients = {diff.verdict for diff in (*comparison.gradients, *comparison.later_gradients)}
    wrong = _different(diff for diff in comparison.parameters if diff.trained)
    if not wrong or "different" in gradients or comparison.candidate.spec.policy.units:
        return
    same = "the same" if gradients <= {"bitwise equal"} else "within rounding"
    where = listed(_names(wrong))
    what, usual = _step(wrong)
    usual = "" if comparison.optimizer_settings else usual
    yield f"The gradients are {same} and the step of {where} is not: {what}.{usual and f' Usual cause: {usual}.'}"


def _settings(comparison: Comparison) -> Iterator[str]:
    """Settings of two programs' optimizers that differ, whether two steps show it or not."""
    settings = comparison.optimizer_settings
    if named := [f"{name} is {old} in the baseline and {new} in the candidate" for name, old, new in settings]:
        yield f"The optimizers differ: {listed(named)}."


def _step(wrong: Sequence[ParameterDiff]) -> tuple[str, str]:
    """The common difference of all steps, and its usual cause."""
    if all(diff.step_ratio == 0 for diff in wrong):
        return "the candidate does not move it", "its optimizer was not given this parameter"
    ratios = [diff.step_ratio for diff in wrong if diff.step_ratio and (diff.step_cosine or 0) > 1 - _bend(diff)]
    if len(ratios) == len(wrong) and max(ratios) - min(ratios) < 0.1 * abs(statistics.median(ratios) - 1):
        factor = statistics.median(ratios)
        return f"it is {factor:.4g} times as long, in the same direction", "another learning rate or momentum"
    if all(abs(diff.decay_cosine or 0) > 1 - _MEANT for diff in wrong):
        return "it differs along the parameter itself", "another weight decay"
    return "the optimizers do something else with them", ""


def _bend(diff: ParameterDiff) -> float:
    """How far below one rounding may bring the cosine of two parallel steps: a short step moves few digits."""
    lost = _HALF_DIGIT.get(diff.dtype, 0.0) * (diff.step_distance or 0.0) / (diff.relative_norm or math.inf)
    return max(_STRAIGHT, min(lost, _MOST_LOST) ** 2)


def _looked_at(comparison: Comparison) -> str:
    checks = []
    if comparison.rng:
        checks.append(f"the positions of {_n(len(comparison.rng), 'generator')}")
    drawn_again = [mask for mask in comparison.masks if mask.n_elements]
    if drawn_again:
        checks.append(f"the random numbers drawn again in {_n(len(drawn_again), 'block')}")
    if comparison.n_carried:
        checks.append(f"{_n(comparison.n_carried, 'value')} that the model remembers")
    watched = comparison.masks_watched or not comparison.candidate.spec.policy.units
    unseen = [] if watched else ["random numbers in forward and recompute were not watched"]
    if left_out := [mask.block for mask in comparison.masks if mask.n_not_drawn_again]:
        unseen.append(f"random numbers that {listed(left_out)} drew in forward were not drawn again")
    if not comparison.n_carried:
        unseen.append("what the model remembers was not looked at")
    looked_at = f"Looked at and equal: {', '.join(checks)}." if checks else "Nothing beside the tensors was looked at."
    if not unseen:
        return looked_at
    unseen_text = " and ".join(unseen)
    return f"{looked_at} {unseen_text[0].upper()}{unseen_text[1:]}."


def _n(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _blocks(changes: list[StateChange]) -> list[str]:
    return list(dict.fromkeys(change.block or "the model" for change in changes))
