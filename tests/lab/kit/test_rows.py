"""The comparison that every row rests on."""

from __future__ import annotations

import pytest
import torch

from explorer.engine.compare.diffs import relative_distance
from explorer.lab.kit.bench import Raised
from explorer.lab.kit.nets import Dropped, chain
from explorer.lab.kit.rows import (
    COSINE,
    DISTANCE,
    EQUAL_TENSORS,
    NORM_RATIO,
    Gap,
    agreement,
    chance_of,
    compared_row,
    distance_bars,
    gap,
    mask_chart,
    mask_rows,
    mismatches,
    size_of,
)


def value_of(far: Gap, name: str) -> object:
    return next(figure.value for figure in far.figures() if figure.name == name)


def test_a_doubled_gradient_is_seen() -> None:
    """The comparison that every row rests on has teeth: a cosine alone would call this equal."""
    right = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    doubled = gap(
        right, {name: 2 * gradient for name, gradient in right.items()}, {n: g.double() for n, g in right.items()}
    )
    assert (
        doubled.outcome == "different"
        and doubled.distance == pytest.approx(1.0)
        and value_of(doubled, COSINE) == pytest.approx(1.0)
    )
    assert gap(right, {**right, "bias": None}).outcome == "missing"
    assert value_of(gap(right, right), EQUAL_TENSORS) == 2


def test_tensors_are_held_against_each_other_together_and_the_absent_as_zeros() -> None:
    right = {"weight": torch.randn(4, 4), "bias": torch.randn(4), "never": None}
    other = {"weight": torch.randn(4, 4), "bias": None, "never": None}
    far = gap(right, other)
    assert far.distance == pytest.approx(relative_distance(right, other), rel=1e-12)
    assert value_of(far, NORM_RATIO) == pytest.approx(
        float(other["weight"].norm() / torch.cat([right["weight"].flatten(), right["bias"]]).norm())  # type: ignore[union-attr,list-item]
    )
    nothing = gap({"weight": torch.zeros(2)}, {"weight": torch.ones(2)})
    assert nothing.distance is None and value_of(nothing, COSINE) is None


def test_bars_have_no_length_where_nothing_came_back() -> None:
    right = {"weight": torch.ones(2)}
    rows = [
        compared_row("doubled", right, {"weight": 2 * torch.ones(2)}),
        compared_row("refused", right, Raised("E", "no")),
    ]
    chart = distance_bars(rows, "How wrong?")
    assert chart.x == ("doubled", "refused") and chart.series[0].y == (1.0, None)
    assert (chart.series[0].name, chart.series[0].part) == (DISTANCE, "candidate")
    assert (size_of(rows[0]), size_of(rows[1])) == ("1", "an unknown amount")


def test_an_absent_gradient_is_named() -> None:
    row = compared_row("partly", {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": None})
    assert row.outcome == "missing" and row.note == "no gradient for b"


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_chance_is_the_share_in_which_two_drawn_masks_differ(p: float) -> None:
    torch.manual_seed(0)
    first, second = torch.rand(2, 200_000) >= p
    # Four standard errors of a share of 200,000 draws are below 0.005.
    assert 1 - agreement(first, second) == pytest.approx(chance_of(p), abs=0.005)


def test_mismatches_compare_the_first_two_masks_of_each_block() -> None:
    model = chain(lambda: Dropped(0.5), 2)
    same, other = torch.tensor([True, False]), torch.tensor([True, True])
    model[0].dropout.masks, model[1].dropout.masks = [same, same], [same, other]
    shares = mismatches(model)
    assert shares == [0.0, 0.5]
    assert [row.outcome for row in mask_rows(shares)] == ["bitwise equal", "different"]
    drawn, chance = mask_chart(shares, 0.5).series
    assert drawn.y == (0.0, 50.0) and chance.y == (50.0, 50.0)
