"""The kit of lessons: the bench, nets, checkpoints, rows of comparisons, and trials in processes of their own."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from explorer.engine.compare.diffs import relative_distance
from explorer.lab.engine.kit import rows as kit
from explorer.lab.engine.kit.bench import Gradients, LabBench, Raised, attempt, row_of_process
from explorer.lab.record import LabFigure, LabRow


def test_an_exception_keeps_its_class_and_its_first_sentence() -> None:
    def refuse() -> None:
        raise RuntimeError(
            "Trying to backward a second time. Saved intermediate values of the graph are freed when you call "
            ".backward() or autograd.grad(), and none is left for another one.\nSpecify retain_graph."
        )

    assert attempt(refuse) == Raised("RuntimeError", "Trying to backward a second time")
    assert str(attempt(refuse)) == "RuntimeError: Trying to backward a second time"
    assert attempt(lambda: 3) == 3


def value_of(far: kit.Gap, name: str) -> object:
    return next(figure.value for figure in far.figures() if figure.name == name)


def test_a_doubled_gradient_is_seen() -> None:
    """The comparison that every row rests on has teeth: a cosine alone would call this equal."""
    right = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    doubled = kit.gap(
        right, {name: 2 * gradient for name, gradient in right.items()}, {n: g.double() for n, g in right.items()}
    )
    assert (
        doubled.outcome == "different"
        and doubled.distance == pytest.approx(1.0)
        and value_of(doubled, kit.COSINE) == pytest.approx(1.0)
    )
    assert kit.gap(right, {**right, "bias": None}).outcome == "missing"
    assert value_of(kit.gap(right, right), kit.EQUAL_TENSORS) == 2


def test_tensors_are_held_against_each_other_together_and_the_absent_as_zeros() -> None:
    right = {"weight": torch.randn(4, 4), "bias": torch.randn(4), "never": None}
    other = {"weight": torch.randn(4, 4), "bias": None, "never": None}
    far = kit.gap(right, other)
    assert far.distance == pytest.approx(relative_distance(right, other), rel=1e-12)
    assert value_of(far, kit.NORM_RATIO) == pytest.approx(
        float(other["weight"].norm() / torch.cat([right["weight"].flatten(), right["bias"]]).norm())  # type: ignore[union-attr,list-item]
    )
    nothing = kit.gap({"weight": torch.zeros(2)}, {"weight": torch.ones(2)})
    assert nothing.distance is None and value_of(nothing, kit.COSINE) is None


def test_bars_have_no_length_where_nothing_came_back() -> None:
    right = {"weight": torch.ones(2)}
    rows = [
        kit.compared_row("doubled", right, {"weight": 2 * torch.ones(2)}),
        kit.compared_row("refused", right, Raised("E", "no")),
    ]
    chart = kit.distance_bars(rows, "How wrong?")
    assert chart.x == ("doubled", "refused") and chart.series[0].y == (1.0, None)
    assert (chart.series[0].name, chart.series[0].part) == (kit.DISTANCE, "candidate")
    assert (kit.size_of(rows[0]), kit.size_of(rows[1])) == ("1", "an unknown amount")


def test_sides_are_rows_beside_their_baseline_and_one_that_raises_is_a_row() -> None:
    right: Gradients = {"weight": torch.ones(2)}

    def refuse() -> Gradients:
        raise ValueError("no")

    def n_tensors(result: Gradients | Raised) -> list[LabFigure]:
        return [kit.counted("tensors", 0 if isinstance(result, Raised) else len(result))]

    runs = {"same": lambda: right, "doubled": lambda: {"weight": 2 * torch.ones(2)}, "refused": refuse}
    rows = kit.sides(LabBench(), ("kept", right), runs, n_tensors)
    assert [row.outcome for row in rows] == ["baseline", "bitwise equal", "different", "raised"]
    assert [row.value("tensors") for row in rows] == [1, 1, 1, 0]
    assert [kit.outcome_sentence(row, "more") for row in rows[1:]] == [
        "Same: gradients bitwise equal; more.",
        "Doubled: no exception, gradients different, off by 1 of their size; more.",
        "Refused refuses: ValueError: no; more.",
    ]


def test_an_absent_gradient_is_named() -> None:
    row = kit.compared_row("partly", {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": None})
    assert row.outcome == "missing" and row.note == "no gradient for b"


def lives(bench: LabBench, label: str) -> LabRow:
    return kit.baseline_row(label, kit.counted("process", os.getpid()))


def leaves(bench: LabBench, label: str) -> LabRow:
    os._exit(7)


def dies(bench: LabBench, label: str) -> LabRow:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def test_a_row_has_a_process_and_a_death_is_a_row() -> None:
    alive, left, dead = (row_of_process(trial, LabBench(), trial.__name__) for trial in (lives, leaves, dies))
    assert alive.outcome == "baseline" and alive.value("process") not in (None, os.getpid())
    assert (left.label, left.outcome) == ("leaves", "crashed") and "exit code 7" in left.note
    assert (dead.label, dead.outcome) == ("dies", "crashed") and dead.note.endswith("ended the process by SIGKILL")
