"""The operators of a block: their bytes are the block's, and the five largest have names."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from explorer.record import Comparison
from explorer.record.base import from_msgpack
from explorer.view.memory.blocks import MOST, NOTHING, REST, operators_chart

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "cpu.msgpack"


@pytest.fixture(scope="module")
def pair() -> Comparison:
    return from_msgpack(GOLDEN.read_bytes(), Comparison)


@pytest.mark.parametrize("block", ["", "blocks.1", "blocks.1.mlp"])
def test_the_operators_of_a_block_add_up_to_what_it_saves(pair: Comparison, block: str) -> None:
    rows = operators_chart(pair.baseline, block).rows()
    assert sum(row["saved (bytes)"] for row in rows) == pair.baseline.by_fqn[block].saved_after_forward_bytes
    sizes = [row["saved (bytes)"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_the_five_largest_are_named_and_the_rest_is_one_bar(pair: Comparison) -> None:
    chart = operators_chart(pair, "blocks.0")
    for trace, run in zip(chart.figure.data, (pair.baseline, pair.candidate)):
        assert list(trace.y)[-1] == REST and len(trace.y) == MOST + 1
        saved = run.by_fqn["blocks.0"].saved_after_forward_bytes
        unit = {"MiB": 2**20, "KiB": 2**10}[chart.figure.layout.xaxis.title.text[-4:-1]]
        assert sum(trace.x) * unit == pytest.approx(saved)
    assert "aten" not in " ".join(chart.figure.data[0].y)
    assert "of blocks.0 keeps for backward" in chart.alt


def test_a_block_that_keeps_nothing_says_so(pair: Comparison) -> None:
    for run, block in ((pair, "no.such"), (replace(pair.baseline, allocations=None), "")):
        assert operators_chart(run, block).figure.layout.annotations[0].text == NOTHING
