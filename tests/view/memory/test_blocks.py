"""Saved bytes per block: every block counted once, recompute visible without colour."""

from __future__ import annotations

import msgspec

from explorer.view.drawing.rows import NO_COSTS
from explorer.view.memory.blocks import saved_bytes_chart
from tests.view.builders import Chain, compared, measured


def test_bars_add_up_to_what_the_model_saves() -> None:
    pair = compared(recompute=[0, 2])
    fig = saved_bytes_chart(pair).figure
    for bar, run in zip(fig.data, (pair.baseline, pair.candidate)):
        head = run.by_fqn["head"].saved_after_forward_bytes
        assert sum(bar.x) * 1024**2 == run.by_fqn[""].saved_after_forward_bytes + head


def test_recomputed_blocks_are_hatched() -> None:
    baseline, candidate = saved_bytes_chart(compared(recompute=[0, 2])).figure.data
    assert set(baseline.marker.pattern.shape) == {""}
    assert candidate.marker.pattern.shape[:4] == ("/", "", "/", "")


def test_one_run_has_one_bar_a_block() -> None:
    (bar,) = saved_bytes_chart(measured()).figure.data
    assert list(bar.y) == [f"layers.{i}" for i in range(6)] + ["head"]


def test_two_hundred_blocks_share_rows() -> None:
    pair = compared(Chain(n_blocks=200), range(200))
    fig = saved_bytes_chart(pair).figure
    assert len(fig.data[0].y) <= 24
    assert fig.data[1].customdata[0][2] == len(fig.data[1].customdata[0][0].split())


def test_table_twin_has_every_block() -> None:
    pair = compared(recompute=[1])
    table = {row["block"]: row for row in saved_bytes_chart(pair).rows()}
    assert len(table) == len(pair.baseline.blocks)
    assert table["layers.1"]["candidate: ran again"] == 1
    assert table["layers.1"]["baseline: ran again"] == 0
    assert table["layers.1"]["candidate: skipped by early stop"] == "250.00 MFLOP"


def test_without_blocks_it_says_so() -> None:
    assert (
        saved_bytes_chart(msgspec.structs.replace(measured(), blocks=())).figure.layout.annotations[0].text == NO_COSTS
    )


def test_alt_says_the_totals() -> None:
    pair = compared(recompute=range(6))
    assert saved_bytes_chart(pair).alt.endswith("91.0 MiB to 7.0 MiB saved when forward ends.")
