"""Memory by rank as pictures: the peak survives, receive buffers are a band, predicted stands beside measured."""

from __future__ import annotations

import msgspec
import pytest

from explorer.record import ModelRef, RunSpec
from explorer.record.pipeline_run import PipelineRun, rank_memory
from explorer.view.pipeline.ranks import against_chart, bands_chart, memory_chart, rank_chart
from tests import graphs, pipelines
from tests.pipelines import MIB

GRAPH = graphs.gpt(4)
MEMORY = rank_memory(
    3,
    "measured",
    [(0, 3 * MIB, ""), (1_000_000, 9 * MIB, "1F0"), (2_000_000, 12 * MIB, "1B0"), (3_000_000, 4 * MIB, "")],
    parameter_bytes=2 * MIB,
    receive_bytes=MIB,
)


@pytest.fixture
def run() -> PipelineRun:
    return pipelines.ran(GRAPH, RunSpec(model=ModelRef(target="m.py"), plan=pipelines.planned(GRAPH)))


def test_each_rank_has_a_picture_on_one_scale_whose_peak_names_its_action(run: PipelineRun) -> None:
    fig = memory_chart(run.memory).figure
    lines = [trace for trace in fig.data if trace.mode == "lines"]
    marks = [trace for trace in fig.data if trace.mode == "markers+text"]
    assert [trace.name for trace in lines] == ["rank 0", "rank 1"]
    for one, line, mark in zip(run.memory, lines, marks):
        assert max(line.y) * MIB == one.peak_bytes
        assert one.peak_action in mark.text[0]
        assert mark.y[0] * MIB == one.peak_bytes
    assert len({trace.yaxis for trace in lines}) == 2  # a row each, and not told apart by a phase's colour
    assert len({trace.line.color for trace in lines}) == 1
    assert fig.layout.yaxis.range == fig.layout.yaxis2.range


def test_one_rank_shows_receive_buffers_as_their_own_band() -> None:
    fig = rank_chart(MEMORY).figure
    parameters, receive, rest = [trace for trace in fig.data if trace.stackgroup]
    assert receive.name == "receive buffers"
    assert [a + b + c for a, b, c in zip(parameters.y, receive.y, rest.y)] == [3, 9, 12, 4]
    assert set(parameters.y) == {2}
    assert set(receive.y) == {1}


def test_bands_add_up_to_the_peak(run: PipelineRun) -> None:
    fig = bands_chart((*run.memory, MEMORY)).figure
    sums = [sum(trace.x[row] for trace in fig.data) * MIB for row in range(3)]
    assert sums == [one.peak_bytes for one in (*run.memory, MEMORY)]


def test_predicted_and_measured_stand_side_by_side(run: PipelineRun) -> None:
    fig = against_chart(run).figure
    assert [trace.name for trace in fig.data] == ["measured", "predicted"]
    assert fig.data[0].x == fig.data[1].x
    assert "furthest off by 0.0 %" in fig.layout.title.subtitle.text


def test_a_run_whose_ranks_were_not_measured_draws_no_comparison(run: PipelineRun) -> None:
    bare = msgspec.structs.replace(run, memory=(rank_memory(0, "measured", [], parameter_bytes=0, receive_bytes=0),))
    assert "not both" in against_chart(bare).figure.layout.annotations[0].text
    assert "not measured" in memory_chart(bare.memory).figure.layout.annotations[0].text
    assert "not measured" in rank_chart(bare.memory[0]).figure.layout.annotations[0].text
    assert "not measured" in bands_chart(()).figure.layout.annotations[0].text


def test_the_table_says_peak_action_and_prediction(run: PipelineRun) -> None:
    (row,) = memory_chart((MEMORY,)).rows()
    assert (row["peak"], row["at"], row["receive buffers"]) == ("12.0 MiB", "1B0", "1.0 MiB")
    assert "predicted" not in row
    assert run.predicted is not None
    assert all(row["predicted"] == row["peak"] for row in memory_chart(run.memory, run.predicted.memory).rows())
    assert "rank 3 12.0 MiB at 1B0" in memory_chart((MEMORY,)).alt
