"""Splitting against recomputing."""

from __future__ import annotations

import pytest

from tests.lab.running import outcomes


@pytest.mark.parametrize("microbatches", ["2", "3", "4"])
@pytest.mark.parametrize(
    ("layer", "split"),
    [("batchnorm", "different"), ("dropout", "different"), ("layernorm", "rounding"), ("plain", "rounding")],
)
def test_splitting_makes_the_difference_and_recomputing_none(layer: str, split: str, microbatches: str) -> None:
    rows = outcomes("microbatching", layer=layer, microbatches=microbatches)
    assert rows["recomputed against microbatches"] == "bitwise equal"
    assert rows["microbatches"] == rows["microbatches, recomputed"] == split
