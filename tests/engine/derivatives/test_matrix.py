"""The derivative matrix is computed: known outcomes come out, and a run that ends its process is a cell."""

from __future__ import annotations

import os
import signal

import msgspec
import pytest

from explorer.engine.derivatives.bench import CellBench
from explorer.engine.derivatives.cell_process import cells_apart
from explorer.engine.derivatives.matrix import VARIANTS, derivative_matrix, with_units
from explorer.engine.derivatives.ways import DERIVATIVES
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.errors import Cancelled
from explorer.record.matrix import DerivativeCell
from explorer.record.policy import Policy
from explorer.record.progress import Progress, silent
from explorer.record.run import RunSpec
from tests.engine import trap_nets
from tests.forked import forked, server_of


def spec(net: str, blocks: tuple[str, ...] = ("1", "2"), **arguments: str) -> RunSpec:
    return RunSpec(model=trap_nets.ref(net, **arguments), policy=Policy.recompute(blocks))


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


@pytest.mark.slow
class TestInAProcessOfItsOwn:
    def test_a_crash_is_a_cell_and_the_rest_goes_on(self) -> None:
        asked = spec("deadly", ("1",), how="crash")
        cells = list(cells_apart(asked, "reentrant", ("backward", "autograd.grad"), lambda: None))
        assert [(cell.derivative, cell.outcome) for cell in cells] == [
            ("backward", "crashes"), ("autograd.grad", "raises"),
        ]  # fmt: skip
        assert cells[0].sentence == "ended the process by SIGSEGV"

    def test_a_hang_ends_at_the_time_limit(self) -> None:
        asked = msgspec.structs.replace(spec("deadly", ("1",), how="hang"), time_limit_s=3.0)
        (cell,) = cells_apart(asked, "reentrant", ("backward",), lambda: None)
        assert (cell.outcome, cell.sentence) == ("not run", "no answer within 3 s")

    def test_cancelled_leaves_no_process_behind(self) -> None:
        def cancel() -> None:
            raise Cancelled("The run was cancelled.")

        before = forked()
        with pytest.raises(Cancelled):
            list(cells_apart(spec("deadly", ("1",), how="hang"), "reentrant", ("backward",), cancel))
        assert forked() <= before

    @pytest.mark.parametrize(
        ("whom", "n_kills", "words"),
        [
            ("cell", 1, "no answer within 3 s"),
            ("cell", 2, "not found out in 2 tries: ended the process by SIGKILL"),
            ("server", 1, "no answer within 3 s"),
        ],
    )
    def test_an_end_from_outside_is_no_outcome_of_the_cell(self, whom: str, n_kills: int, words: str) -> None:
        killed: set[int] = set()

        def kill() -> None:
            for pid in (forked() - killed) if len(killed) < n_kills else ():
                killed.add(pid)
                os.kill(pid if whom == "cell" else server_of(pid), signal.SIGKILL)

        asked = msgspec.structs.replace(spec("deadly", ("1",), how="hang"), time_limit_s=3.0)
        hanging, following = cells_apart(asked, "reentrant", ("backward", "autograd.grad"), kill)
        assert len(killed) == n_kills
        assert (hanging.outcome, following.outcome) == ("not run", "raises")
        assert words in hanging.sentence

    def test_the_whole_matrix(self) -> None:
        heard: list[Progress] = []
        asked = spec("dropout", ("1",))
        matrix = derivative_matrix(asked, heard.append)
        assert [(cell.derivative, cell.variant) for cell in matrix.cells] == [
            (derivative, variant) for derivative in DERIVATIVES for variant in VARIANTS
        ]
        assert matrix.blocks == ("1",)
        assert matrix.cell("backward", "keep").outcome == "bitwise equal"
        assert matrix.cell("Hessian-vector product", "reentrant").outcome == "different"
        assert heard[-1].done == heard[-1].total == len(matrix.cells)


def test_without_units_the_repeats_are_taken() -> None:
    asked = spec("plain", ())
    assert with_units(asked, silent).policy.blocks == describe(asked.model).repeats != ()
    assert with_units(spec("plain", ("2",)), silent).policy.blocks == ("2",)


def test_a_cell_that_was_left_out_is_a_key_error() -> None:
    from explorer.record.matrix import DerivativeMatrix

    cell = DerivativeCell(derivative="backward", variant="keep", outcome="bitwise equal", sentence="")
    matrix = DerivativeMatrix(spec=spec("dropout"), blocks=("1",), cells=(cell,))
    assert matrix.cell("backward", "keep") is cell
    with pytest.raises(KeyError):
        matrix.cell("backward", "selective")
