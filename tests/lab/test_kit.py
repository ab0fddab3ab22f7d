"""The kit of lessons: the bench, nets, checkpoints, rows of comparisons, and trials in processes of their own."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from torch import nn

from explorer.engine.compare.diffs import relative_distance
from explorer.lab.kit.bench import (
    Gradients,
    LabBench,
    Raised,
    attempt,
    gradients_by_name,
    hessian_product,
    row_of_process,
    step_gradients,
)
from explorer.lab.kit.checkpoints import CHECKPOINTS, ENGINES, engine_policy
from explorer.lab.kit.nets import BATCH, WIDTH, Dropped, Normed, Residual, block_names, blocks_of, chain
from explorer.lab.kit.rows import (
    COSINE,
    DISTANCE,
    EQUAL_TENSORS,
    NORM_RATIO,
    Gap,
    baseline_row,
    compared_row,
    counted,
    distance_bars,
    gap,
    mask_chart,
    mask_rows,
    mismatches,
    outcome_sentence,
    sides,
    size_of,
)
from explorer.record.lab import LabFigure, LabRow
from explorer.record.policy import KEEP_ALL


def test_an_exception_keeps_its_class_and_its_first_sentence() -> None:
    def refuse() -> None:
        raise RuntimeError(
            "Trying to backward a second time. Saved intermediate values of the graph are freed when you call "
            ".backward() or autograd.grad(), and none is left for another one.\nSpecify retain_graph."
        )

    assert attempt(refuse) == Raised("RuntimeError", "Trying to backward a second time")
    assert str(attempt(refuse)) == "RuntimeError: Trying to backward a second time"
    assert attempt(lambda: 3) == 3


def test_gradients_by_name_are_those_of_backward_and_none_where_unused() -> None:
    model, x = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)}), torch.randn(2, 4)
    used = step_gradients(model["used"], x)
    named = gradients_by_name(model["used"](x).square().mean(), model, allow_unused=True)
    assert named["idle.weight"] is None and named["idle.bias"] is None
    assert all(torch.equal(named[f"used.{name}"], gradient) for name, gradient in used.items())
    with pytest.raises(RuntimeError, match="not have been used"):
        gradients_by_name(model["used"](x).square().mean(), model)


def test_random_numbers_are_the_same_and_move_no_generator() -> None:
    before = torch.get_rng_state()
    assert torch.equal(LabBench().normal(3, seed=5), LabBench().normal(3, seed=5))
    assert not torch.equal(LabBench().normal(3, seed=5), LabBench().normal(3, seed=6))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_of_a_cubic_it_is_six_times_the_weight_along_the_direction() -> None:
    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.idle = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.ones(1))

    model = Cubic()
    (model.w**3).sum().backward(create_graph=True)
    product = hessian_product(model, lambda parameter: torch.tensor([1.0, -1.0]))
    model.zero_grad()  # the cycle between parameter and gradient
    assert product["w"].tolist() == [6.0, -12.0] and product.get("idle") is None


def test_a_chain_is_the_same_for_the_same_seed_and_named() -> None:
    first, again, other = (chain(Residual, 3, seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not torch.equal(first[0].first.weight, other[0].first.weight)
    assert block_names(first) == ["block0", "block1", "block2"]
    assert blocks_of(first, Residual) == list(first) and blocks_of(first, Normed) == []


def test_dropout_remembers_each_mask_and_scales_what_it_keeps() -> None:
    (block,) = chain(partial(Dropped, 0.5), 1)
    x = torch.ones(BATCH, WIDTH)
    kept = block.dropout(x)
    (mask,) = block.dropout.masks
    assert torch.equal(kept, mask * 2.0) and 0 < mask.float().mean() < 1
    block.eval()
    assert torch.equal(block.dropout(x), x) and len(block.dropout.masks) == 1


def test_every_engine_is_a_policy_and_only_keep_recomputes_nothing() -> None:
    assert {engine for engine in ENGINES if engine_policy(engine, ["block0"]) == KEEP_ALL} == {"keep"}
    assert {*ENGINES} - {"keep"} < {*CHECKPOINTS}
    assert engine_policy("reentrant", ["block0"]).use_reentrant


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


def test_sides_are_rows_beside_their_baseline_and_one_that_raises_is_a_row() -> None:
    right: Gradients = {"weight": torch.ones(2)}

    def refuse() -> Gradients:
        raise ValueError("no")

    def n_tensors(result: Gradients | Raised) -> list[LabFigure]:
        return [counted("tensors", 0 if isinstance(result, Raised) else len(result))]

    runs = {"same": lambda: right, "doubled": lambda: {"weight": 2 * torch.ones(2)}, "refused": refuse}
    rows = sides(LabBench(), ("kept", right), runs, n_tensors)
    assert [row.outcome for row in rows] == ["baseline", "bitwise equal", "different", "raised"]
    assert [row.value("tensors") for row in rows] == [1, 1, 1, 0]
    assert [outcome_sentence(row, "more") for row in rows[1:]] == [
        "Same: gradients bitwise equal; more.",
        "Doubled: no exception, gradients different, off by 1 of their size; more.",
        "Refused refuses: ValueError: no; more.",
    ]


def test_an_absent_gradient_is_named() -> None:
    row = compared_row("partly", {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": None})
    assert row.outcome == "missing" and row.note == "no gradient for b"


def test_mismatches_compare_the_first_two_masks_of_each_block() -> None:
    model = chain(lambda: Dropped(0.5), 2)
    same, other = torch.tensor([True, False]), torch.tensor([True, True])
    model[0].dropout.masks, model[1].dropout.masks = [same, same], [same, other]
    shares = mismatches(model)
    assert shares == [0.0, 0.5]
    assert [row.outcome for row in mask_rows(shares)] == ["bitwise equal", "different"]
    drawn, chance = mask_chart(shares, 0.5).series
    assert drawn.y == (0.0, 50.0) and chance.y == (50.0, 50.0)


def lives(bench: LabBench, label: str) -> LabRow:
    return baseline_row(label, counted("process", os.getpid()))


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
