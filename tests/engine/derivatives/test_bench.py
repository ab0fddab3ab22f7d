"""One cell of the matrix: what a way to differentiate yields under a checkpointing, held against keep."""

from __future__ import annotations

import pytest

from explorer.engine.derivatives.bench import CellBench
from explorer.engine.derivatives.ways import DERIVATIVES
from explorer.engine.model.load import load
from tests.engine.derivatives.nets import spec


def bench(net: str, *blocks: str) -> CellBench:
    asked = spec(net, blocks or ("1", "2"))
    return CellBench(asked, load(asked.model))


@pytest.mark.parametrize("derivative", list(DERIVATIVES))
@pytest.mark.parametrize("net", ["dropout", "batch_norm"])
def test_non_reentrant_recompute_survives_everything(net: str, derivative: str) -> None:
    cell = bench(net).cell(derivative, "recompute")
    assert (cell.outcome, cell.n_equal) == ("bitwise equal", cell.n_tensors), cell.sentence


@pytest.mark.parametrize(("derivative", "outcome"), [
    ("backward", "bitwise equal"), ("autograd.grad", "raises"), ("gradient penalty", "raises"),
    ("Hessian-vector product", "different"), ("eval mode", "bitwise equal"),
])  # fmt: skip
def test_reentrant_refuses_some_and_is_silently_wrong_in_others(derivative: str, outcome: str) -> None:
    cell = bench("dropout", "1").cell(derivative, "reentrant")
    assert cell.outcome == outcome
    if outcome == "raises":
        assert "use_reentrant=True" in cell.sentence
    if outcome == "different":
        assert cell.relative_norm is not None and cell.relative_norm > 0.1


@pytest.mark.parametrize("derivative", ["backward twice", "Hessian-vector product", "gradient penalty"])
def test_selective_has_one_backward(derivative: str) -> None:
    cell = bench("dropout").cell(derivative, "selective")
    assert cell.outcome == "raises" and "extra time" in cell.sentence


def test_keep_is_held_against_itself() -> None:
    assert bench("dropout").cell("backward", "keep").outcome == "bitwise equal"
    assert bench("nondeterministic", "1").cell("backward", "keep").outcome == "different"


def test_where_keep_raises_there_is_nothing_to_compare() -> None:
    cell = bench("no_second_order", "1").cell("Hessian-vector product", "recompute")
    assert cell.outcome in ("raises", "not run")
    assert bench("no_second_order", "1").cell("Hessian-vector product", "keep").outcome == "raises"


def test_missing_gradients_are_counted() -> None:
    cell = bench("nested", "block").cell("backward", "reentrant")
    assert cell.outcome == "different" and cell.sentence.startswith("4 of 6 gradients missing")
    assert cell.relative_norm is not None
