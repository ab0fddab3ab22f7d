"""The schedule as a picture: a bar an action, the critical path, the prediction below, one microbatch followed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from explorer.plan.pipeline.stage_costs import predict
from explorer.record import ModelRef, Policy, RunSpec
from explorer.record.pipeline_run import PlayedSchedule
from explorer.view.pipeline.gantt import FADED, PARTS, gantt, rank_table
from tests import graphs, pipelines

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


def test_the_line_runs_along_the_critical_path_from_start_to_end() -> None:
    one = forecast()
    (line,) = [trace for trace in gantt(one).figure.data if trace.name == "critical path"]
    assert (line.x[0], line.x[-1]) == (0.0, one.makespan_ms)
    assert len(line.x) == 2 * len(one.critical_path)
    assert list(line.x) == sorted(line.x)


def test_the_prediction_is_a_thin_row_without_a_legend_of_its_own() -> None:
    measured = msgspec.structs.replace(forecast(), origin="measured")
    both = bars(gantt(measured, forecast()).figure)
    thick, thin = both[: len(both) // 2], both[len(both) // 2 :]
    assert len(thin) == len(thick)
    assert all(trace.showlegend for trace in thick)
    assert not any(trace.showlegend for trace in thin)
    assert max(trace.width for trace in thin) < min(trace.width for trace in thick)
    assert all("predicted" in trace.hovertemplate for trace in thin)


def test_following_one_microbatch_fades_all_others() -> None:
    for trace in bars(gantt(forecast(), follow=2).figure):
        for custom, opacity in zip(trace.customdata, trace.marker.opacity):
            assert opacity == (1.0 if custom[2] == 2 else FADED)


def test_the_title_and_the_rows_say_who_waits() -> None:
    one = forecast()
    fig = gantt(one).figure
    assert "idle 20.0 %" in fig.layout.title.subtitle.text
    assert "predicted" in fig.layout.title.subtitle.text
    idle = (f"rank {use.rank}\nidle {100 * use.bubble_fraction:.0f} %" for use in one.ranks)
    assert fig.layout.yaxis.ticktext == tuple(idle)
    assert all(f"rank {use.rank}" in gantt(one).alt for use in one.ranks)


def test_narrow_bars_carry_no_number() -> None:
    many = forecast(n_microbatches=64)
    assert not any(text for trace in bars(gantt(many).figure) for text in trace.text)


def test_a_split_backward_has_two_looks() -> None:
    plan = pipelines.planned(GRAPH, 4, schedule="ZBVZeroBubble")
    names = {trace.name for trace in bars(gantt(predict(pipelines.priced(GRAPH, SPEC), plan, SPEC.policy)).figure)}
    assert {"backward, input part", "backward, weight part"} <= names


def test_nothing_played_is_said_in_words() -> None:
    fig = gantt(PlayedSchedule(origin="predicted", actions=(), ranks=())).figure
    assert fig.layout.annotations[0].text == "No action was played."
    assert set(PARTS) >= {"F", "B"}


def test_tables_hold_every_action_and_every_rank() -> None:
    one = forecast()
    table = gantt(one).rows()
    assert [row["action"] for row in table if row["on critical path"]] == list(one.critical_path)
    assert len(table) == len(one.actions)
    assert [row["rank"] for row in rank_table(one, one)] == [0, 1]
    assert rank_table(one, one)[0]["idle, predicted"] == rank_table(one)[0]["idle"]


def test_bars_of_a_rank_with_several_stages_say_which() -> None:
    plan = pipelines.planned(GRAPH, 4, schedule="Interleaved1F1B")
    one = predict(pipelines.priced(GRAPH, SPEC), plan, SPEC.policy)
    sentences = {
        text: edge
        for trace in bars(gantt(one).figure)
        for text, edge in zip(trace.text, trace.marker.line.color, strict=True)
        if text
    }
    assert {f"{action.stage}:{action.microbatch}" for action in one.actions} >= set(sentences)
    assert len({edge for text, edge in sentences.items() if text.startswith("0:")}) == 1
    assert len(set(sentences.values())) == 4
    assert {text for trace in bars(gantt(forecast()).figure) for text in trace.text} <= {"", "0", "1", "2", "3"}
