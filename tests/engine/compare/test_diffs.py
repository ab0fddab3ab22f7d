"""Tensors on disk keep every bit; distances are exact and blind to nothing that usual closeness checks miss."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from explorer.engine.compare import diffs as diffs_file
from explorer.engine.compare.diffs import TensorsOnDisk, Yardstick, difference, differences, max_ulp, relative_distance
from explorer.engine.state.bits import dense, same_bits
from explorer.record.comparison import BufferDiff, GradientDiff, ParameterDiff

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def judged(baseline: Tensor | None, candidate: Tensor | None, reference: Tensor | None = None) -> GradientDiff:
    exact = baseline.double() if reference is None and baseline is not None else reference
    return difference(GradientDiff, "w", baseline, candidate, Yardstick(rerun={"w": baseline}, reference={"w": exact}))


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_counts_the_floats_between(dtype: torch.dtype) -> None:
    start = torch.tensor([1.0, -1.0, 0.0], dtype=dtype)
    there = start
    for _ in range(3):
        there = torch.nextafter(there, torch.tensor(math.inf, dtype=dtype))
    assert max_ulp(start, there) == max_ulp(there, start) == 3
    smallest, huge = torch.tensor([math.ldexp(1, -149)]), torch.tensor([1e308], dtype=torch.float64)
    assert max_ulp(-smallest, smallest) == 2 and max_ulp(torch.tensor([-0.0]), torch.tensor([0.0])) == 0
    assert max_ulp(-huge, huge) == 2**63 - 1, "it does not wrap"


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=8), st.integers(0, 31))
@settings(max_examples=30, deadline=None)
def test_a_tensor_equals_its_copy_and_no_tensor_with_one_flipped_bit(values: list[float], bit: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    flipped = tensor.clone()
    flipped.view(torch.int32)[-1] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(torch.int32)
    assert same_bits(tensor, tensor.clone()) and judged(tensor, tensor.clone()).bitwise
    assert not same_bits(tensor, flipped) and not judged(tensor, flipped).bitwise


ONES = torch.ones(4)


@pytest.mark.parametrize(("baseline", "candidate", "presence", "verdict"), [
    (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), "both", "not comparable"),
    (ONES, None, "baseline only", "different"),
    (None, ONES, "candidate only", "different"),
    (None, None, "neither", "bitwise equal"),
    (ONES, torch.ones(2, 2), "both", "different"),
    (ONES, ONES.double(), "both", "different"),
])  # fmt: skip
def test_absence_form_and_nan(baseline: Tensor | None, candidate: Tensor | None, presence: str, verdict: str) -> None:
    diff = judged(baseline, candidate)
    assert (diff.presence, diff.verdict) == (presence, verdict)


def test_buffers_may_be_infinite_and_integers_complex_and_sparse_tensors_compare() -> None:
    mask, counter = torch.full((2, 2), -math.inf).triu(1), torch.tensor(7)
    wave, rows = torch.tensor([1 + 2j, 3 - 1j]), torch.eye(3).to_sparse()
    for tensor in (mask, counter, wave, rows):
        assert difference(BufferDiff, "b", tensor, tensor.clone(), Yardstick()).verdict == "bitwise equal"
    diff = difference(BufferDiff, "n", counter, counter + 1, Yardstick(reference={"n": counter}))
    assert (diff.verdict, diff.max_abs) == ("different", 1.0)
    assert difference(GradientDiff, "w", wave, wave * 2, Yardstick()).norm_ratio == pytest.approx(2.0)
    assert not difference(GradientDiff, "w", rows, rows * 2, Yardstick()).bitwise


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_element_is_a_difference_however_small_the_rest(wrong: float) -> None:
    baseline = torch.randn(100, generator=torch.Generator().manual_seed(0))
    candidate = baseline.clone()
    candidate[7] = wrong
    diff = judged(baseline, candidate)
    assert (diff.verdict, diff.n_nonfinite_mismatch, diff.max_abs) == ("different", 1, 0.0)


def test_names_of_both_sides_are_listed_and_noise_is_the_distance_to_the_rerun() -> None:
    base = torch.tensor([3.0, 4.0])
    yardstick = Yardstick(rerun={"a": base + torch.tensor([0.0, 0.5])})
    diffs = differences(GradientDiff, {"a": base, "b": base}, {"a": base + 1, "c": base}, yardstick)
    assert [(diff.name, diff.presence) for diff in diffs] == [
        ("a", "both"), ("b", "baseline only"), ("c", "candidate only"),
    ]  # fmt: skip
    assert [diff.noise for diff in diffs] == [0.5, None, None]


def test_all_figures_of_a_doubled_gradient() -> None:
    diff = judged(torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]))
    assert (diff.max_abs, diff.relative_norm, diff.cosine, diff.norm_ratio) == (4.0, 1.0, 1.0, 2.0)
    assert diff.verdict == "different"
    underflows = judged(torch.full((4,), 1e-30), torch.full((4,), -1e-30))
    assert underflows.cosine == pytest.approx(-1.0), "their squares are zero"


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-12, 1e6])
def test_the_verdict_does_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1000, generator=generator, dtype=torch.float64) * scale
    baseline = exact.float()
    one_ulp_off = torch.nextafter(baseline, torch.zeros(()))
    assert judged(baseline, one_ulp_off, exact).verdict == "rounding"
    assert judged(baseline, baseline * 1.0001, exact).verdict == "different"


def test_a_truly_zero_gradient_may_be_any_noise() -> None:
    """A key bias under softmax: both runs hold noise alone, 148 % apart, and both are right."""
    generator = torch.Generator().manual_seed(0)
    weight, zero = torch.randn(500, generator=generator, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    noise = [torch.randn(50, generator=generator) * 2e-9 for _ in range(2)]
    yardstick = Yardstick(reference={"weight": weight, "other": weight, "key.bias": zero})
    diff = difference(GradientDiff, "key.bias", noise[0], noise[1], yardstick)
    assert diff.relative_norm is not None and diff.relative_norm > 1
    assert diff.verdict == "rounding"
    assert difference(GradientDiff, "key.bias", noise[0], noise[1] + 1e-4, yardstick).verdict == "different"


@pytest.mark.parametrize(("times", "verdict"), [(9.9, "rounding"), (10.1, "different")])
def test_a_gradient_that_is_zero_in_both_references_may_be_ten_epsilons_of_the_run(times: float, verdict: str) -> None:
    """The baseline hits the zero by luck, so neither its error nor its rerun gives a scale: the run's norms do."""
    weight, zero = torch.full((4,), 3.0, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    yardstick = Yardstick(rerun={"bias": torch.zeros(1)}, reference={"weight": weight, "other": weight, "bias": zero})
    noise = torch.full((1,), times * torch.finfo(torch.float32).eps * 6.0)
    assert difference(GradientDiff, "bias", torch.zeros(1), noise, yardstick).verdict == verdict


EPSILON = 2**-23  # of float32; borders are in numbers, as a test that reads the constants cannot see them change


@pytest.mark.parametrize(("epsilon", "used"), [(2**-7, EPSILON), (EPSILON, EPSILON), (2**-52, 2**-52)])
def test_the_floor_is_that_of_float32_for_coarser_runs_and_finer_for_float64(epsilon: float, used: float) -> None:
    ones = torch.ones(4, dtype=torch.float64)
    assert Yardstick(reference={"w": ones}, epsilon=epsilon).tiny(ones) == 2 * used


@pytest.mark.parametrize(("times", "trusted"), [(9.9, True), (10.1, False)])
def test_a_reference_may_be_ten_floors_away(times: float, *, trusted: bool) -> None:
    """The tensor itself is small, so half of its digits give no floor."""
    large, small = torch.full((1,), 1.0, dtype=torch.float64), torch.full((1,), 1e-9, dtype=torch.float64)
    yardstick = Yardstick(reference={"a": large, "b": large, "small": small})
    assert yardstick.trusts(small, times * EPSILON) is trusted


@pytest.mark.parametrize(("times", "verdict"), [(9.9, "rounding"), (10.1, "different")])
def test_beside_an_optimizer_step_a_parameter_may_be_ten_quarters_of_its_epsilon_away(
    times: float, verdict: str
) -> None:
    one, before = torch.tensor([1.0, 0.0]), torch.zeros(2)
    yardstick = Yardstick(reference={"w": one.double()}, before={"w": before})
    beside = torch.tensor([1.0, times * EPSILON / 4])
    assert difference(ParameterDiff, "w", one, beside, yardstick).verdict == verdict


@pytest.mark.parametrize(("longer", "error"), [(6.0e-5, 0.0), (6.2e-5, 6.2e-5)])
def test_the_length_of_an_optimizer_step_may_be_off_by_512_epsilons(longer: float, error: float) -> None:
    one = torch.tensor([1.0, 0.0], dtype=torch.float64)
    yardstick = Yardstick(before={"w": torch.zeros(2)})
    assert yardstick.errors("w", one, one * (1 + longer)) == [pytest.approx(error, abs=1e-9)]


def test_a_tensor_that_is_small_in_its_run_is_measured_by_the_run() -> None:
    large = torch.ones(1, dtype=torch.float64)
    left = {"a": large, "b": large, "bias": 1e-9 * large}
    assert diffs_file.worst_distance(left, {**left, "bias": 2e-9 * large}) == pytest.approx(1e-9)
    assert diffs_file.worst_distance(left, {**left, "a": 1.5 * large}) == 0.5


def test_a_reference_that_went_another_way_excuses_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    baseline, other = torch.randn(2, 200, generator=generator)
    diff = judged(baseline, baseline * 1.1, reference=other.double())
    assert (diff.candidate_error, diff.verdict) == (None, "different")
    assert "float64 did not follow" in diff.never_rounds


def test_a_gradient_that_is_zero_in_exact_arithmetic_has_a_reference() -> None:
    """A bias before a norm: float64 says 1e-18, float32 leaves 1e-6 on a run whose gradients are of size one."""
    yardstick = Yardstick(reference={"a": torch.ones(1), "b": torch.ones(1), "zero": torch.full((4,), 1e-18)})
    zero = yardstick.reference["zero"]
    assert yardstick.trusts(zero.double(), 2e-6)
    assert not yardstick.trusts(zero.double(), 1e-3), "on the run's scale it is no zero"
    assert not yardstick.trusts(torch.full((4,), 1e-7, dtype=torch.float64), 2e-6), "float64 does not say zero"


def test_an_absent_tensor_counts_as_zero() -> None:
    whole = {"w": torch.tensor([3.0]), "v": torch.tensor([4.0])}
    assert relative_distance(whole, {"w": torch.tensor([3.0]), "v": None}) == 0.8
    assert relative_distance({"w": None}, {"w": torch.ones(1)}) is None
    assert relative_distance({"w": torch.zeros(1)}, {"w": torch.zeros(1)}) == 0.0


TENSORS: dict[str, Tensor | None] = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "none": None,
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "half": torch.randn(5, dtype=torch.float16),
    "brain": torch.randn(2, 3, dtype=torch.bfloat16),
    "double": torch.randn(7, dtype=torch.float64),
    "complex": torch.randn(4, dtype=torch.complex64).conj(),
    "flags": torch.tensor([True, False]),
    "nan": torch.tensor([math.nan, -0.0, math.inf]),
    "sparse": torch.eye(3).to_sparse(),
}


def full_disk(**options: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("place", ["in memory", "on disk", "on a full disk"])
def test_every_bit_comes_back_after_the_tensor_has_changed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffs_file, "SMALL_BYTES", 4096 if place == "in memory" else 0)
    if place == "on a full disk":
        monkeypatch.setattr(diffs_file.tempfile, "TemporaryFile", full_disk)
    written = {name: None if tensor is None else tensor.clone() for name, tensor in TENSORS.items()}
    stored = TensorsOnDisk(written.items())
    assert list(stored) == list(TENSORS)
    for name in reversed(TENSORS):
        tensor, copy, read = TENSORS[name], written[name], stored[name]
        if tensor is None or copy is None or read is None:
            assert tensor is copy is read is None
        else:
            copy.zero_()
            assert same_bits(dense(tensor), stored[name] if place == "on disk" else read), name


def test_equal_tensors_are_written_once_and_the_position_of_the_file_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that forks shares the position with its copy."""
    monkeypatch.setattr(diffs_file, "SMALL_BYTES", 0)
    first = TensorsOnDisk([("same", torch.ones(1000)), ("other", torch.ones(1000))])
    extent = first._extents["same"]
    os.lseek(extent.file.open.fileno(), 7, os.SEEK_SET)
    second = TensorsOnDisk([("same", torch.ones(1000)), ("other", torch.zeros(1000))], first)
    assert second._end == 4000
    for name, value in (("same", 1.0), ("other", 0.0)):
        read = second[name]
        assert read is not None and bool((read == value).all())
    assert os.lseek(extent.file.open.fileno(), 0, os.SEEK_CUR) == 7
