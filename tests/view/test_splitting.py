"""Whose fault a difference is, as counts; and how often blocks ran."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from explorer.record import ModelRef, Policy, RunSpec
from explorer.record.pipeline import PipelineRun
from explorer.view.splitting import calls_chart, calls_table, nearness, truth_alt, truth_chart, truth_table
from tests import graphs, pipelines

GRAPH = graphs.gpt(4)
N = len(GRAPH.spine)


def run(n_moved: int = 0, on: tuple[str, ...] = ()) -> PipelineRun:
    spec = RunSpec(model=ModelRef(target="m.py"), plan=pipelines.planned(GRAPH), policy=Policy.recompute(on))
    return pipelines.ran(GRAPH, spec, n_moved=n_moved)


def counts(fig: Any) -> dict[str, tuple[int, ...]]:
    return {trace.name: tuple(trace.x) for trace in fig.data}


def test_every_step_counts_all_gradients() -> None:
    found = counts(truth_chart(run(n_moved=3)))
    assert found == {
        "bitwise equal": (0, N, N - 3),
        "within rounding size": (N, 0, 0),
        "different": (0, 0, 3),
    }
    assert f"splitting left {N - 3} of {N}" in truth_chart(run(n_moved=3)).layout.title.subtitle.text
    assert f"splitting {N - 3} of {N}" in truth_alt(run(n_moved=3))


@pytest.mark.parametrize(
    ("dtype", "distance", "said"),
    [
        ("float32", 3e-6, "within rounding size"),
        ("float32", 1e-4, "different"),
        ("float64", 3e-6, "different"),
        ("bfloat16", 0.005, "within rounding size"),
        ("bfloat16", 0.5, "different"),
        ("int64", 1e-9, "different"),
    ],
)
def test_rounding_size_depends_on_the_format(dtype: str, distance: float, said: str) -> None:
    assert nearness(msgspec.structs.replace(pipelines.gradient_diff("w", distance), dtype=dtype)) == said


def test_one_side_alone_is_different_however_small() -> None:
    alone = msgspec.structs.replace(pipelines.gradient_diff("w", 1e-9), presence="candidate only")
    assert nearness(alone) == "different"


def test_the_table_has_gradients_and_buffers() -> None:
    table = truth_table(run(n_moved=1))
    assert [row["what"] for row in table] == ["gradient"] * N + ["buffer"]
    assert table[0]["splitting"] == "0.001 (different)"
    assert table[1]["splitting"] == "0 (bitwise)"
    assert table[0]["microbatching"] == "1e-07 (within rounding size)"


def test_a_recomputed_block_runs_twice_for_each_forward_call() -> None:
    fig = calls_chart(run(on=("blocks.1",)))
    first, again = fig.data
    assert set(first.x) == {1}
    assert dict(zip(again.y, again.x)) == {fqn: float(fqn == "blocks.1") for fqn in GRAPH.spine}
    assert "at most 2 runs" in fig.layout.title.subtitle.text
    assert "every block ran once" in calls_chart(run()).layout.title.subtitle.text
    by_block = {row["block"]: row["runs per forward call"] for row in calls_table(run(on=("blocks.1",)))}
    assert by_block == {fqn: 2 if fqn == "blocks.1" else 1 for fqn in GRAPH.spine}


def test_unknown_is_said_in_words() -> None:
    bare = msgspec.structs.replace(run(), gradients=(), blocks=())
    assert truth_chart(bare).layout.annotations[0].text == "No gradient was compared."
    assert calls_chart(bare).layout.annotations[0].text == "Calls were not counted."
