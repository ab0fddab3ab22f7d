"""What the differing tensors of two programs have in common: where forward parts, or from where on backward does.

Each rule says what was computed, and beside it what usually causes it. gradients.py reads the other evidence.
"""

from __future__ import annotations

from collections.abc import Iterator

from explorer.plan.names import listed
from explorer.record.comparison import Comparison

_BACKWARD = "a detach or no_grad, a hook, a backward written by hand, a recompute that is not what forward was"
_LOSS = "shifted targets, padding that counts, smoothing, a term that is missing, another reduction"
_AFTER = "gradients that were not zeroed, are clipped or scaled otherwise, or come from a part of the batch"


def patterns(comparison: Comparison) -> Iterator[str]:
    """Sentences of two programs whose first gradients differ; none where forward was not watched."""
    if comparison.untied:
        yield f"{listed(comparison.untied)} are one parameter in one of the two programs alone: a tie is broken."
    forward = comparison.forward
    first, later = (
        any(diff.verdict == "different" for diff in family)
        for family in (comparison.gradients, comparison.later_gradients)
    )
    if later and not first and not comparison.candidate.spec.policy.units:
        yield (
            "The gradients of the first step are the same and those of a later step are not: something is left from "
            "the step before. Usual causes: gradients that were not zeroed, state that the step moves."
        )
    if forward is None or not first:
        return
    if forward.n_calls[0] != forward.n_calls[1]:
        one, other = forward.n_calls
        yield (
            f"The model is called {_times(one)} in a step of the baseline and {_times(other)} in the candidate's. "
            "Usual causes: other microbatches, and a divisor or a mean that does not fit them."
        )
    elif forward.block is not None:
        yield _parts(comparison)
    elif forward.same and forward.n_compared and comparison.loss_equal is False:
        yield (f"The model returns the same and the loss is another. Usual causes: {_LOSS}.")
    elif forward.same and forward.n_compared:
        yield from _in_backward(comparison, forward.order)


def _parts(comparison: Comparison) -> str:
    forward = comparison.forward
    assert forward is not None
    where = forward.block or "The model"
    if forward.in_baseline != forward.in_candidate:
        what = f": it is {forward.in_baseline} in the baseline and {forward.in_candidate} in the candidate."
    else:
        what = ". Usual causes: a mask, a scale, a dimension, a number format inside it."
    return f"{where} is the first block that returns another output for the same input{what}"


def _in_backward(comparison: Comparison, order: tuple[str, ...]) -> Iterator[str]:
    """Forward is the same: which gradients are not."""
    places = {fqn: i for i, fqn in enumerate(order)}
    came = [diff for diff in comparison.gradients if diff.presence != "neither"]
    known = [diff for diff in came if diff.name.rpartition(".")[0] in places]
    known.sort(key=lambda diff: places[diff.name.rpartition(".")[0]])
    wrong = [diff for diff in known if diff.verdict == "different"]
    if not wrong:
        return
    behind = known[known.index(wrong[-1]) + 1 :]
    begin = f"The model returns the same{' and the loss is equal' if comparison.loss_equal else ''}"
    usual = "" if comparison.loss_equal else f"{_LOSS}, "
    if len(wrong) == 1 and len(came) > 1:
        yield f"{begin}; the gradient of {wrong[0].name} alone differs. Usual causes: {usual}{_BACKWARD}."
    elif behind:
        yield (
            f"{begin}; backward is the same down to {behind[0].name}, and {len(wrong)} of the "
            f"{len(known) - len(behind)} gradients before it differ, {wrong[-1].name} first. "
            f"Usual causes: {usual}{_BACKWARD}."
        )
    else:
        yield (
            f"{begin}; {len(wrong)} of {len(came)} gradients differ, that of the last block among them. "
            f"Usual causes: {usual}{_AFTER}."
        )


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"
