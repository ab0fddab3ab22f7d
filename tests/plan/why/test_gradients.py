"""Causes of a difference come from its evidence, and patterns of two programs from their tensors."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from explorer.plan.why.gradients import causes, patterns
from explorer.record.comparison import Comparison, ForwardDiff, MaskDiff, RngDiff, StateChange
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.record.test_comparison import STEP, compared, gradient

WRONG = gradient("w", bitwise=False, relative_norm=0.5, norm_ratio=1.0, cosine=0.5)


def told(*gradients: Any, policy: Policy = Policy.recompute(["a"]), **evidence: Any) -> tuple[str, ...]:  # noqa: B008
    candidate = replace(STEP, spec=RunSpec(model=STEP.spec.model, policy=policy))
    return causes(replace(compared(*(gradients or (WRONG,)), **evidence), candidate=candidate))


def moved(name: str, kind: str) -> StateChange:
    return StateChange(block="a", name=name, kind=kind, after_forward="1", after_backward="2")


CAUSES = [
    ({"masks": (MaskDiff(block="a", n_elements=10, n_mismatched=4),)}, "The dropout mask differs in a between"),
    ({"rng": (RngDiff(generator="python", equal=False),)}, "The recompute drew from python once more"),
    ({"rng": (RngDiff(generator="torch cpu", equal=False),)}, "The generator torch cpu stands elsewhere"),
    ({"state_changes": (moved("running_mean", "buffer"),)}, "Running statistics moved twice in a"),
    ({"state_changes": (moved("n", "attribute"),)}, "The recompute changed the attribute n of a once more (1 → 2)"),
]


@pytest.mark.parametrize(("evidence", "cause"), CAUSES)
def test_evidence_is_named(evidence: dict[str, Any], cause: str) -> None:
    assert told(**evidence)[0].startswith(cause)


def test_masks_come_before_state() -> None:
    both = {**CAUSES[0][0], **CAUSES[3][0]}
    assert [cause.split()[0] for cause in told(**both)] == ["The", "Running"]


def test_an_option_that_is_off_is_said_with_the_mask() -> None:
    careless = Policy.recompute(["a"], preserve_rng_state=False)
    assert told(policy=careless, **CAUSES[0][0])[0].endswith("preserve_rng_state is off.")


def test_a_gradient_that_never_came_has_a_reason_under_reentrant() -> None:
    gone = gradient("w", presence="baseline only", bitwise=False)
    assert told(gone)[0] == "No gradient came for w."
    assert (
        "reentrant checkpointing passes no gradient"
        in told(gone, policy=Policy.recompute(["a"], use_reentrant=True))[0]
    )


@pytest.mark.parametrize(("ratios", "says"), [((2.0, 2.0), True), ((2.0, 3.0), False), ((1.0, 1.0), False)])
def test_one_factor_for_all_is_a_divisor(ratios: tuple[float, ...], says: bool) -> None:
    wrong = [gradient(str(r), bitwise=False, norm_ratio=r, cosine=1.0, relative_norm=1.0) for r in ratios]
    assert any("2 times the baseline's, in the same direction" in cause for cause in told(*wrong)) == says


def test_nan_of_both_runs_is_said_of_equal_ones() -> None:
    assert told(gradient("w", n_nonfinite=1))[0].startswith("NaN or infinity stands in w of both runs")


def test_without_evidence_it_says_what_was_looked_at_and_what_not() -> None:
    (cause,) = told(rng=(RngDiff(generator="torch cpu", equal=True),))
    assert cause.startswith("Looked at and equal: the positions of 1 generator.")
    assert "what the model remembers was not looked at" in cause


def test_where_nothing_differs_there_is_no_cause() -> None:
    assert told(gradient()) == () and isinstance(compared(), Comparison)


FORWARD = ForwardDiff(n_calls=(1, 1), n_compared=4, order=("", "a", "b", "c"), same=True)


def pattern_of(wrong: str, *, forward: ForwardDiff | None = FORWARD, **more: Any) -> str:
    gradients = [gradient(f"{block}.w", bitwise=block not in wrong) for block in "abc"]
    return " ".join(patterns(compared(*gradients, forward=forward, **more)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("ab", "backward is the same down to c.w, and 2 of the 2 gradients before it differ, b.w first"),
        ("a", "the gradient of a.w alone differs"),
        ("abc", "3 of 3 gradients differ, that of the last block among them"),
        ("", ""),
    ],
)
def test_equal_forwards_leave_backward(wrong: str, says: str) -> None:
    assert says in pattern_of(wrong) and bool(pattern_of(wrong)) == bool(wrong)


def test_a_loss_that_is_not_known_to_be_equal_stays_among_the_causes() -> None:
    assert "shifted targets" in pattern_of("ab") and "shifted targets" not in pattern_of("ab", loss_equal=True)
    assert pattern_of("ab", loss_equal=False).startswith("The model returns the same and the loss is another.")


def test_forward_that_differs_by_rounding_alone_is_not_called_the_same() -> None:
    assert pattern_of("ab", forward=replace(FORWARD, same=False)) == ""
    assert pattern_of("ab", forward=None) == ""


def test_a_step_after_the_first_is_told_apart() -> None:
    later = (gradient("a.w", bitwise=False),)
    assert pattern_of("", later_gradients=later).startswith(
        "The gradients of the first step are the same and those of a"
    )
    assert "first step" not in pattern_of("a", later_gradients=later)
