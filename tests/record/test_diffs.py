"""A verdict of one tensor is derived from its distances."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.record.comparison import ROUNDING_FACTOR, BufferDiff, GradientDiff, MaskDiff, ParameterDiff, StateDiff


def gradient(name: str = "w", *, bitwise: bool = True, **more: object) -> GradientDiff:
    return msgspec.structs.replace(
        GradientDiff(name=name, shape=(2,), dtype="float32", presence="both", bitwise=bitwise), **more
    )


ROUNDED = {"baseline_error": 1.0, "candidate_error": 2.0, "max_abs": 1e-7}


@given(error=st.floats(0, 1e3), noise=st.floats(0, 1e3), tiny=st.floats(0, 1e3), candidate=st.floats(0, 1e5))
def test_rounding_is_a_multiple_of_what_the_baseline_shows(
    error: float, noise: float, tiny: float, candidate: float
) -> None:
    diff = gradient(bitwise=False, baseline_error=error, noise=noise, tiny=tiny, candidate_error=candidate)
    allowed = candidate <= ROUNDING_FACTOR * max(error, noise, tiny)
    assert diff.verdict == ("rounding" if allowed else "different")


def test_without_a_reference_only_bits_count() -> None:
    assert gradient(bitwise=False, max_abs=1e-30).verdict == "different"


NAN_ON_BOTH_SIDES = {"shape": (2,), "dtype": "float32", "presence": "both", "bitwise": True, "n_nonfinite": 1}


def test_equal_nan_proves_nothing_of_a_gradient_and_is_equal_in_a_buffer() -> None:
    assert GradientDiff(name="w", **NAN_ON_BOTH_SIDES).verdict == "not comparable"
    assert BufferDiff(name="n", **NAN_ON_BOTH_SIDES).verdict == "bitwise equal"


@pytest.mark.parametrize(("more", "verdict"), [
    ({}, "different"),
    ({"gradients_round": True}, "rounding"),
    ({"gradients_round": True, "bitwise": True}, "bitwise equal"),
    ({"gradients_round": True, "presence": "baseline only"}, "different"),
    ({"gradients_round": True, "n_nonfinite": 1}, "different"),
    ({"gradients_round": True, "n_nonfinite_mismatch": 1}, "different"),
])  # fmt: skip
def test_what_an_optimizer_makes_of_rounding_is_rounding(more: dict[str, object], verdict: str) -> None:
    diff = ParameterDiff(name="w", shape=(2,), dtype="float32", presence="both", bitwise=False)
    assert msgspec.structs.replace(diff, **more).verdict == verdict


@pytest.mark.parametrize(("block", "name", "place"), [
    ("blocks.0", "blocks.0.cache.step", "cache.step of blocks.0"),
    ("", "step", "step"),
])  # fmt: skip
def test_what_is_carried_on_is_named_by_its_block(block: str, name: str, place: str) -> None:
    shape = {"shape": (), "dtype": "int", "presence": "both", "bitwise": False, "kind": "attribute", "step": 1}
    assert StateDiff(name=name, block=block, **shape).place == place


def test_a_tensor_is_named_by_the_module_that_holds_it() -> None:
    assert (gradient("blocks.0.weight").place, gradient("weight").place) == ("weight of blocks.0", "weight")


def test_a_module_without_random_numbers_has_no_share_that_differs() -> None:
    assert MaskDiff(block="drop", n_elements=10, n_mismatched=4).mismatch_share == 0.4
    assert MaskDiff(block="drop", n_elements=0, n_mismatched=0).mismatch_share == 0.0
