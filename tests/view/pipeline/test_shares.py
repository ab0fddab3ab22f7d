"""Whose fault a difference is, as counts; and how often blocks ran."""

from __future__ import annotations

from typing import Any

import msgspec

from explorer.record import ModelRef, Policy, RunSpec
from explorer.record.pipeline_run import PipelineRun
from explorer.view.pipeline.shares import calls_chart, truth_chart, truth_table
from tests import graphs, pipelines

GRAPH = graphs.gpt(4)
N = len(GRAPH.chain)


def run(n_moved: int = 0, on: tuple[str, ...] = ()) -> PipelineRun:
    spec = RunSpec(model=ModelRef(target="m.py"), plan=pipelines.planned(GRAPH), policy=Policy.recompute(on))
    return pipelines.ran(GRAPH, spec, n_moved=n_moved)


def counts(fig: Any) -> dict[str, tuple[int, ...]]:
    return {trace.name: tuple(trace.x) for trace in fig.data}


def test_every_step_counts_all_gradients() -> None:
    ran = counts(truth_chart(run(n_moved=3)).figure)
    assert ran == {
        "bitwise equal": (0, N, N - 3),
        "rounding": (N, 0, 0),
        "different": (0, 0, 3),
    }
    assert f"splitting left {N - 3} of {N}" in truth_chart(run(n_moved=3)).figure.layout.title.subtitle.text
    assert f"splitting {N - 3} of {N}" in truth_chart(run(n_moved=3)).alt


def test_the_record_judges_not_the_size_of_a_distance() -> None:
    """A distance that is small beside the gradient, and ten thousand times that of the baseline from float64."""
    ran = run()
    far = msgspec.structs.replace(
        pipelines.gradient_diff("w", 1e-6), baseline_error=1e-10, candidate_error=1e-6, tiny=0.0
    )
    first = msgspec.structs.replace(ran.gradients[0], splitting=far)
    shown = msgspec.structs.replace(ran, gradients=(first, *ran.gradients[1:]))
    assert counts(truth_chart(shown).figure)["different"] == (0, 0, 1)
    assert truth_table(shown)[0]["splitting"] == "1e-06 (different)"
    assert [moved.name for moved in shown.moved] == [first.name]


def test_a_gradient_that_never_came_is_no_distance() -> None:
    ran = run()
    lost = msgspec.structs.replace(
        pipelines.gradient_diff("w", 0.0), presence="baseline only", bitwise=False, relative_norm=None
    )
    first = msgspec.structs.replace(ran.gradients[0], splitting=lost)
    shown = msgspec.structs.replace(ran, gradients=(first, *ran.gradients[1:]))
    assert truth_table(shown)[0]["splitting"] == "no gradient came"
    assert "lost 1 gradient" in truth_chart(shown).figure.layout.title.subtitle.text


def test_the_table_has_gradients_and_buffers() -> None:
    table = truth_table(run(n_moved=1))
    assert [row["what"] for row in table] == ["gradient"] * N + ["buffer"]
    assert table[0]["splitting"] == "0.001 (different)"
    assert table[1]["splitting"] == "0 (bitwise)"
    assert table[0]["microbatching"] == "1e-07 (rounding)"


def test_a_recomputed_block_runs_twice_for_each_forward_call() -> None:
    fig = calls_chart(run(on=("blocks.1",))).figure
    first, again = fig.data
    assert set(first.x) == {1}
    assert dict(zip(again.y, again.x)) == {fqn: float(fqn == "blocks.1") for fqn in GRAPH.chain}
    assert "at most 2 runs" in fig.layout.title.subtitle.text
    assert "every block ran once" in calls_chart(run()).figure.layout.title.subtitle.text
    by_block = {row["block"]: row["runs per forward call"] for row in calls_chart(run(on=("blocks.1",))).rows()}
    assert by_block == {fqn: 2 if fqn == "blocks.1" else 1 for fqn in GRAPH.chain}


def test_unknown_is_said_in_words() -> None:
    bare = msgspec.structs.replace(run(), gradients=(), blocks=())
    assert truth_chart(bare).figure.layout.annotations[0].text == "No gradient was compared."
    assert calls_chart(bare).figure.layout.annotations[0].text == "Calls were not counted."
