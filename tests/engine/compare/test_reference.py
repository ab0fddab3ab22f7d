"""The step in float64, which rounding is held against; where there is none, it is said why."""

from __future__ import annotations

import torch

from explorer.engine.compare.reference import coarsest_epsilon, epsilon_of, most_common_type
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec
from tests.engine.judging import judged


def test_reentrant_rounding_is_told_from_wrong() -> None:
    """The fused LSTM kernel of a forward without gradients rounds differently: rounding, held against float64."""
    comparison = judged("lstm", ("lstm",), use_reentrant=True)
    assert (comparison.verdict, comparison.reference) == ("rounding", "float64")
    assert comparison.n_bitwise_equal < len(comparison.gradients)


def test_a_reference_with_other_random_numbers_is_refused() -> None:
    """Numbers of a source that no seed governs are others in float64: that run is no reference."""
    comparison = judged("another_way_in_float64", ("1",))
    assert comparison.reference == "none" and "source without a seed" in comparison.no_reference_because
    comparison = judged("float32_alone", ("1",))
    assert comparison.reference == "none" and "does not run in float64: RuntimeError" in comparison.no_reference_because
    assert judged("dropout").reference == "float64"


def test_the_type_of_most_gradients_is_what_random_numbers_are_drawn_in() -> None:
    half, full = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert most_common_type({"a": half, "b": full, "c": half, "d": None}) == torch.bfloat16
    assert most_common_type({"a": None}) == torch.get_default_dtype()


def test_rounding_is_measured_by_the_coarsest_type() -> None:
    half, full = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert epsilon_of({"a": full}, set()) == torch.finfo(torch.float32).eps
    assert epsilon_of({"a": full, "b": half}, set()) == torch.finfo(torch.bfloat16).eps
    assert epsilon_of({"a": full}, {torch.float16}) == torch.finfo(torch.float16).eps
    spec = RunSpec(model=ModelRef(target="a.py"), autocast="bfloat16")
    assert coarsest_epsilon(spec, {"a": full}) == torch.finfo(torch.bfloat16).eps
