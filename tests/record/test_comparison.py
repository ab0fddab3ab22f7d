"""The verdict of one tensor is derived from its distances, the verdict of a comparison from its tensors."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.record import Failure, Measurement, ModelRef, RunSpec
from explorer.record.comparison import (
    ROUNDING_FACTOR,
    BufferDiff,
    Comparison,
    GradientDiff,
    MaskDiff,
    ParameterDiff,
    RngDiff,
    StateDiff,
    TensorDiff,
)
from tests.view.builders import HOST


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


@pytest.mark.parametrize("scale", ["baseline_error", "noise", "tiny"])
@pytest.mark.parametrize(("times", "verdict"), [(9.9, "rounding"), (10.1, "different")])
def test_ten_times_the_largest_scale_is_the_border_of_rounding(scale: str, times: float, verdict: str) -> None:
    """In numbers, not in terms of the constant: a test that multiplies by the constant cannot see it change."""
    scales = {"baseline_error": 0.0, "noise": 0.0, "tiny": 0.0, scale: 3e-6}
    assert gradient(bitwise=False, candidate_error=times * 3e-6, **scales).verdict == verdict


def test_a_reason_against_rounding_decides_whatever_the_errors_are() -> None:
    rounded = gradient(bitwise=False, **ROUNDED)
    reason = "A recompute moved it a second time."
    assert rounded.verdict == "rounding"
    assert msgspec.structs.replace(rounded, never_rounds=reason).verdict == "different"
    assert gradient(bitwise=True, never_rounds=reason).verdict == "bitwise equal"


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


SPEC = RunSpec(model=ModelRef(target="sample_models/mlp.py"))
STEP = Measurement(spec=SPEC, environment=HOST)


def compared(*gradients: GradientDiff, **more: object) -> Comparison:
    return msgspec.structs.replace(Comparison(baseline=STEP, candidate=STEP, gradients=gradients), **more)


def test_all_bits_equal() -> None:
    assert compared(gradient(), gradient("b")).verdict == "bitwise equal"
    assert compared(gradient()).worst is None


@pytest.mark.parametrize("presence", ["baseline only", "candidate only"])
def test_a_missing_gradient_is_different(presence: str) -> None:
    assert compared(gradient(), gradient("b", presence=presence, bitwise=False)).verdict == "different"


def test_nan_never_passes() -> None:
    one_side = gradient(bitwise=False, n_nonfinite=1, n_nonfinite_mismatch=1, **ROUNDED)
    other_bits = gradient(bitwise=False, n_nonfinite=1, **ROUNDED)
    both = gradient(bitwise=True, n_nonfinite=1)
    assert compared(one_side).verdict == "different"
    assert compared(other_bits).verdict == "different"
    assert compared(both).verdict == "not comparable"
    assert compared(both).n_bitwise_equal == 0


def test_the_worst_verdict_decides() -> None:
    rounding = gradient("r", bitwise=False, **ROUNDED)
    buffer = BufferDiff(name="b", shape=(), dtype="int64", presence="both", bitwise=False, max_abs=1.0)
    assert compared(gradient(), rounding).verdict == "rounding"
    assert compared(gradient(), rounding, buffers=(buffer,)).verdict == "different"
    assert compared(rounding, gradient("b", bitwise=False), buffers=(buffer,)).verdict == "different"


BUFFER = BufferDiff(name="blocks.0.n", shape=(), dtype="int64", presence="both", bitwise=False, max_abs=1.0)
FROZEN = ParameterDiff(name="key.weight", shape=(2,), dtype="float32", presence="both", bitwise=False, trained=False)
STEP_OF = StateDiff(
    name="blocks.0.step",
    shape=(),
    dtype="int",
    presence="both",
    bitwise=False,
    block="blocks.0",
    kind="attribute",
    step=1,
)
OUTPUT = TensorDiff(name="output in eval mode", shape=(1,), dtype="float32", presence="both", bitwise=False)


@pytest.mark.parametrize(("beside", "moved"), [
    ({"rng": (RngDiff(generator="python", equal=False),)}, ("generator python",)),
    ({"buffers": (BUFFER,)}, ("n of blocks.0",)),
    ({"carried": (STEP_OF,)}, ("step of blocks.0",)),
    ({"parameters": (FROZEN,)}, ("weight of key",)),
    ({"eval_output": OUTPUT}, ("output in eval mode",)),
    ({"eval_output": OUTPUT, "buffers": (BUFFER,)}, ("n of blocks.0",)),
])  # fmt: skip
def test_equal_gradients_beside_state_that_moved_are_a_verdict_of_their_own(
    beside: dict[str, object], moved: tuple[str, ...]
) -> None:
    assert compared(gradient(), **beside).verdict == "state moved"
    assert compared(gradient(), **beside).moved_twice == moved
    assert compared(gradient("r", bitwise=False, **ROUNDED), **beside).verdict == "different", "never rounding"
    assert compared(gradient("d", bitwise=False), **beside).verdict == "different"


def test_a_mask_drawn_anew_is_never_rounding() -> None:
    masks = (MaskDiff(block="drop", n_elements=10, n_mismatched=4),)
    assert compared(gradient("r", bitwise=False, **ROUNDED), masks=masks).verdict == "different"
    assert compared(gradient(), masks=masks).verdict == "state moved"


def test_what_is_trained_is_judged_with_the_gradients() -> None:
    moved = msgspec.structs.replace(STEP_OF, kind="parameter")
    assert compared(gradient(), carried=(moved,)).verdict == "different"
    assert compared(gradient(), later_gradients=(gradient(bitwise=False),)).verdict == "different"
    assert compared(gradient(), input_gradients=(gradient(bitwise=False),)).verdict == "different"
    assert (
        compared(gradient(), parameters=(msgspec.structs.replace(FROZEN, trained=True, gradients_round=True),)).verdict
        == "rounding"
    )
    assert compared(gradient(presence="neither"), trains_in_backward=True).verdict == "bitwise equal"


def test_no_gradient_on_either_side_is_nothing_to_be_equal() -> None:
    comparison = compared(gradient(), gradient("b", presence="neither"))
    assert (comparison.n_bitwise_equal, comparison.n_gradients) == (1, 1)


def test_not_comparable() -> None:
    assert compared().verdict == "not comparable"
    assert compared(gradient(presence="neither")).verdict == "not comparable"
    assert compared(gradient(), reproducible=False).verdict == "not comparable"
    failed = Failure(kind="model raised", sentence="It raised.")
    assert compared(gradient(), failure=failed).verdict == "not comparable"


def test_the_loss_is_never_part_of_the_verdict() -> None:
    assert compared(gradient(), loss_equal=False).verdict == "bitwise equal"
    assert compared(gradient(presence="baseline only", bitwise=False), loss_equal=True).verdict == "different"


def test_the_worst_is_missing_before_nonfinite_before_far() -> None:
    far = gradient("far", bitwise=False, relative_norm=1e9)
    poisoned = gradient("poisoned", bitwise=False, n_nonfinite_mismatch=1)
    gone = gradient("gone", bitwise=False, presence="baseline only")
    rounding = gradient("rounding", bitwise=False, relative_norm=1e12, **ROUNDED)
    for expected, among in [("gone", (far, poisoned, gone)), ("poisoned", (far, poisoned)), ("far", (rounding, far))]:
        worst = compared(*among).worst
        assert worst is not None and worst.name == expected


def test_a_gradient_that_is_zero_but_for_noise_never_leads() -> None:
    noise = gradient("bias", bitwise=False, relative_norm=11.0, baseline_norm=1e-9, baseline_error=1e-9)
    wrong = gradient("w", bitwise=False, relative_norm=0.01, baseline_norm=1.0)
    assert [diff.name for diff in compared(noise, wrong, wrong).furthest_first] == ["w", "w", "bias"]
    born = gradient("born", bitwise=False, relative_norm=1e9, baseline_norm=1e-9)  # noise on one side alone
    assert compared(noise, wrong, wrong, born).furthest_first[0].name == "born"


@pytest.mark.parametrize(("norm", "error", "relative", "first"), [
    (0.9e-3, 0.9e-3, 0.5, "w"),
    (1.1e-3, 1.1e-3, 0.5, "bias"),
    (1e-6, 0.51e-6, 0.5, "w"),
    (1e-6, 0.49e-6, 0.5, "bias"),
    (1e-4, 1e-4, 9.9, "w"),
    (1e-4, 1e-4, 10.1, "bias"),
])  # fmt: skip
def test_noise_is_half_wrong_and_a_thousandth_of_the_median_norm(
    norm: float, error: float, relative: float, first: str
) -> None:
    bias = gradient("bias", bitwise=False, relative_norm=relative, baseline_norm=norm, baseline_error=error)
    wrong = gradient("w", bitwise=False, relative_norm=0.01, baseline_norm=1.0)
    assert compared(bias, wrong, wrong).furthest_first[0].name == first
