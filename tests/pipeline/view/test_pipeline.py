"""Charts of the Pipeline page: schedule, ranks, causes of moved gradients, and the headline."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from explorer.pipeline.plan.clock import notes, simulate
from explorer.pipeline.plan.schedules import SCHEDULES, rows_of
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.record.step import JointPlan, PipelineRun, PlayedSchedule, RankMemory
from explorer.pipeline.view import text as words
from explorer.pipeline.view.gantt import gantt, link_table, rank_table
from explorer.pipeline.view.headline import figures, fullest
from explorer.pipeline.view.results import bands_chart, calls_chart, memory_chart, truth_chart, truth_table
from explorer.pipeline.view.text import cap_outcome, plan_sentence, within_cap
from explorer.record import ModelRef, Policy, RunSpec
from explorer.record.base import from_msgpack, to_msgpack
from explorer.view.drawing.figure import Chart
from tests import graphs
from tests.pipeline import pipelines
from tests.pipeline.pipelines import MIB, planned, ran
from tests.view.reports import KINDS, figures_in, text_of

GRAPH = graphs.gpt(4)
SPEC = RunSpec(model=ModelRef(target="m.py"))
PLAN = pipelines.planned(GRAPH, 2)


def forecast(policy: Policy | None = None, **plan: object) -> PlayedSchedule:
    chosen = msgspec.structs.replace(PLAN, **plan)
    return predict(pipelines.priced(GRAPH, SPEC), chosen, policy or SPEC.policy)


def bars(fig: Any) -> list[Any]:
    return [trace for trace in fig.data if trace.type == "bar"]


def test_every_action_is_a_bar_of_its_own_length_on_its_rank() -> None:
    one = forecast()
    drawn = {
        custom[0]: (start, length, round(y))
        for trace in bars(gantt(one).figure)
        for custom, start, length, y in zip(trace.customdata, trace.base, trace.x, trace.y)
    }
    assert drawn == {a.name: (a.start_ms, a.duration_ms, a.rank) for a in one.actions}
    assert len(drawn) == 2 * 2 * 4
    fig = gantt(one).figure
    (line,) = [trace for trace in fig.data if trace.name == "critical path"]
    assert (line.x[0], line.x[-1]) == (0.0, one.makespan_ms)
    assert len(line.x) == 2 * len(one.critical_path) and list(line.x) == sorted(line.x)
    assert fig.layout.title.subtitle.text.endswith("idle 20.0 % (predicted)")
    idle = (f"rank {use.rank}\nidle {100 * use.bubble_fraction:.0f} %" for use in one.ranks)
    assert fig.layout.yaxis.ticktext == tuple(idle)
    assert all(f"rank {use.rank}" in gantt(one).alt for use in one.ranks)


def test_recompute_is_the_first_part_of_a_backward() -> None:
    one = forecast(Policy.recompute(["blocks.0"]))
    by_name = {trace.name: trace for trace in bars(gantt(one).figure)}
    again, backward = by_name["recompute"], by_name["backward"]
    action = next(a for a in one.actions if a.recompute_ms)
    place = [custom[0] for custom in again.customdata].index(action.name)
    assert (again.base[place], again.x[place]) == (action.start_ms, action.recompute_ms)
    place = [custom[0] for custom in backward.customdata].index(action.name)
    assert backward.base[place] == action.start_ms + action.recompute_ms
    assert backward.base[place] + backward.x[place] == pytest.approx(action.end_ms)
    split = simulate(rows_of(planned(GRAPH, 4, schedule="ZBVZeroBubble")))
    names = {trace.name for trace in bars(gantt(split).figure)}
    assert {"backward, input part", "backward, weight part"} <= names


def test_tables_hold_every_action_and_every_rank() -> None:
    one = forecast()
    table = gantt(one).rows()
    assert [row["action"] for row in table if row["on critical path"]] == list(one.critical_path)
    assert len(table) == len(one.actions)
    assert [row["rank"] for row in rank_table(one, one)] == [0, 1]
    assert rank_table(one, one)[0]["idle, predicted"] == rank_table(one)[0]["idle"]


MEMORY = RankMemory.of(
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
    assert 1 < fig.layout.yaxis.range[1] / max(max(line.y) for line in lines) < 1.5


def test_bands_add_up_to_the_peak(run: PipelineRun) -> None:
    fig = bands_chart((*run.memory, MEMORY)).figure
    sums = [sum(trace.x[row] for trace in fig.data) * MIB for row in range(3)]
    assert sums == [one.peak_bytes for one in (*run.memory, MEMORY)]
    bare = (RankMemory.of(0, "measured", [], parameter_bytes=0, receive_bytes=0),)
    for chart in (memory_chart(bare), bands_chart(())):
        assert "not measured" in chart.figure.layout.annotations[0].text


def test_the_table_says_peak_action_and_prediction(run: PipelineRun) -> None:
    (row,) = memory_chart((MEMORY,)).rows()
    assert (row["peak"], row["at"], row["receive buffers"]) == ("12.0 MiB", "1B0", "1.0 MiB")
    assert "predicted" not in row
    assert run.predicted is not None
    assert all(row["predicted"] == row["peak"] for row in memory_chart(run.memory, run.predicted.memory).rows())
    assert "rank 3 12.0 MiB at 1B0" in memory_chart((MEMORY,)).alt


N = len(GRAPH.chain)


def run_shares(n_moved: int = 0, on: tuple[str, ...] = ()) -> PipelineRun:
    spec = RunSpec(model=ModelRef(target="m.py"), plan=pipelines.planned(GRAPH), policy=Policy.recompute(on))
    return pipelines.ran(GRAPH, spec, n_moved=n_moved)


def counts(fig: Any) -> dict[str, tuple[int, ...]]:
    return {trace.name: tuple(trace.x) for trace in fig.data}


def test_every_step_counts_all_gradients() -> None:
    ran = counts(truth_chart(run_shares(n_moved=3)).figure)
    assert ran == {"bitwise equal": (0, N, N - 3), "rounding": (N, 0, 0), "different": (0, 0, 3)}
    assert f"splitting left {N - 3} of {N}" in truth_chart(run_shares(n_moved=3)).figure.layout.title.subtitle.text
    assert f"splitting {N - 3} of {N}" in truth_chart(run_shares(n_moved=3)).alt
    table = truth_table(run_shares(n_moved=1))
    assert [row["what"] for row in table] == ["gradient"] * N + ["buffer"]
    assert [row["splitting"] for row in table[:2]] == ["0.001 (different)", "0 (bitwise)"]
    assert table[0]["microbatching"] == "1e-07 (rounding)"


def test_what_microbatching_alone_makes_different_is_no_alarm() -> None:
    ran = run_shares(n_moved=3)
    far = ran.gradients[0].splitting
    moved = [msgspec.structs.replace(shares, microbatching=far) for shares in ran.gradients]
    fig = truth_chart(msgspec.structs.replace(ran, gradients=tuple(moved))).figure
    assert counts(fig)["different"] == (0, 0, 3) and counts(fig)["different before the split"] == (N, 0, 0)
    colours = {trace.name: trace.marker.color for trace in fig.data}
    assert colours["different before the split"] != colours["different"]


def test_a_gradient_that_never_came_is_no_distance() -> None:
    ran = run_shares()
    lost = msgspec.structs.replace(
        pipelines.gradient_diff("w", 0.0), presence="baseline only", bitwise=False, relative_norm=None
    )
    first = msgspec.structs.replace(ran.gradients[0], splitting=lost)
    shown = msgspec.structs.replace(ran, gradients=(first, *ran.gradients[1:]))
    assert truth_table(shown)[0]["splitting"] == "no gradient came"
    assert "lost 1 gradient" in truth_chart(shown).figure.layout.title.subtitle.text


def test_a_recomputed_block_runs_twice_for_each_forward_call() -> None:
    fig = calls_chart(run_shares(on=("blocks.1",))).figure
    first, again = fig.data
    assert set(first.x) == {1}
    assert dict(zip(again.y, again.x)) == {fqn: float(fqn == "blocks.1") for fqn in GRAPH.chain}
    assert "at most 2 runs" in fig.layout.title.subtitle.text
    assert "every block ran once" in calls_chart(run_shares()).figure.layout.title.subtitle.text
    by_block = {row["block"]: row["runs per forward call"] for row in calls_chart(run_shares(on=("blocks.1",))).rows()}
    assert by_block == {fqn: 2 if fqn == "blocks.1" else 1 for fqn in GRAPH.chain}
    bare = msgspec.structs.replace(run_shares(), gradients=(), blocks=())
    assert truth_chart(bare).figure.layout.annotations[0].text == "No gradient was compared."
    assert calls_chart(bare).figure.layout.annotations[0].text == "Calls were not counted."


PLAN_HEADLINE = planned(GRAPH)


def run_of(**changes: object) -> PipelineRun:
    return replace(ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN_HEADLINE)), **changes)


def test_a_prediction_says_so_and_what_the_ranks_gain() -> None:
    step, bubble, peak, gradients, plan = figures(None, None, None, before=None)
    assert {one.value for one in (step, bubble, peak)} == {"not measured"}, "nothing is known before a price"
    assert {one.origin for one in (step, bubble, peak, gradients, plan)} == {()}
    assert (gradients.value, plan.value) == ("not compared", "none yet")
    predicted = run_of().predicted
    assert predicted is not None
    step, bubble, peak, *_, plan = figures(None, predicted, PLAN_HEADLINE, before=None)
    assert {one.origin for one in (step, bubble, peak)} == {("predicted",)}
    work = sum(use.busy_ms for use in predicted.ranks)
    assert step.delta == f"{work / predicted.makespan_ms:.2f}× as fast as one rank"
    assert (plan.value, plan.delta) == ("2 stages", "4 microbatches, 2 ranks")


def test_a_run_is_held_against_its_prediction() -> None:
    run = run_of()
    step, bubble, peak, gradients, _ = figures(run, None, PLAN_HEADLINE, before=None)
    assert {one.origin for one in (step, bubble, peak, gradients)} == {("measured",)}
    assert step.delta.startswith(f"predicted {step.value}, off by") and bubble.delta == f"predicted {bubble.value}"
    worst = fullest(run.memory)
    assert worst is not None and peak.label == f"Peak of rank {worst.rank}"
    assert peak.delta.startswith(f"predicted {peak.value}, + ") and peak.delta.endswith("optimizer")
    at_once = run_of(wall=run.composed)
    assert figures(at_once, None, PLAN_HEADLINE, before=None)[0].delta.endswith("with free links")


def test_a_stored_run_of_the_former_engine_procs_still_opens() -> None:
    stored = ran(GRAPH, replace(SPEC, plan=PLAN), engine="procs")
    run = from_msgpack(to_msgpack(stored), PipelineRun)
    assert run == stored and run.engine == "procs"
    assert "Ranks ran at once on this machine" in notes(run)[0]


FOUR = graphs.gpt(4)


PLAN_OF_FOUR = pipelines.planned(FOUR)


JOINT = JointPlan(
    plan=PLAN_OF_FOUR, policy=Policy.recompute(["blocks.0"]), cap_bytes=80 * MIB, makespan_ms=20.0,
    rank_bytes=(70 * MIB, 60 * MIB), n_judged=9,
)  # fmt: skip


def test_a_plan_says_what_it_chose_and_how_many_were_tried() -> None:
    text = plan_sentence(JOINT)
    assert text.startswith("Planned below 80.0 MiB a rank: stages of ") and "1 block recomputed" in text
    assert "fullest rank 70.0 MiB, step 20.0 ms" in text and " 9 plans " in text


def test_a_run_keeps_the_cap_or_says_which_rank_does_not() -> None:
    run = pipelines.ran(FOUR, RunSpec(model=FOUR.model, plan=PLAN_OF_FOUR))
    most = run.fullest_bytes
    assert most is not None
    kept, missed = (replace(JOINT, cap_bytes=cap) for cap in (most, most - 1))
    assert within_cap(run, kept) and cap_outcome(run, kept).startswith("cap ") and " kept: " in cap_outcome(run, kept)
    assert within_cap(run, missed) is False and " missed: rank " in cap_outcome(run, missed)
    unmeasured = RankMemory.of(0, "measured", [], parameter_bytes=0, receive_bytes=0)
    for memory in ((), (unmeasured,)):
        blind = replace(run, memory=memory)
        assert within_cap(blind, missed) is None and cap_outcome(blind, missed) == ""


def test_every_schedule_is_explained() -> None:
    assert all(schedule.name in words.SCHEDULE for schedule in SCHEDULES.values())


def test_a_pipeline_says_what_its_strip_says() -> None:
    run, text = KINDS["pipeline"], text_of("pipeline")
    for figure in figures(run, None, run.spec.plan, before=None):
        assert figure.value in text and figure.label in text
    for part in ("Schedule", "Memory", "Gradients", "Calls", "Hazards", "Environment"):
        assert f"<h2>{part}</h2>" in text
    assert all(note in text for note in run.notes)
    assert "actions-of-the-schedule" in figures_in(text)


def charts_of(run: PipelineRun) -> list[Chart]:
    """Every chart of a run; tables are made beside them."""
    charts = [memory_chart(run.memory, run.memory)]
    for schedule in filter(None, (run.composed, run.wall, run.predicted)):
        charts += [gantt(schedule, run.predicted)]
        rank_table(schedule, run.predicted), link_table(schedule, run.stages)
    return charts


def of_a_pipeline(names: str = "blocks") -> list[Chart]:
    graph = graphs.gpt(4, names=names)
    run = pipelines.ran(graph, RunSpec(model=ModelRef(target="m.py"), plan=pipelines.planned(graph)))
    assert run.timing is not None and run.predicted is not None
    return [
        gantt(run.timing, run.predicted),
        gantt(run.predicted),
        memory_chart(run.memory),
        memory_chart(run.memory[:1]),
        bands_chart(run.memory),
        truth_chart(run),
        calls_chart(run),
    ]
