"""What a run prints and what its document holds beside the record: caveats, ranks, what splitting moved, a cap."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from explorer.cli.report import document, print_pipeline
from explorer.record import Policy, RunSpec
from explorer.record.pipeline_run import fullest_bytes
from explorer.record.plan import JointPlan
from tests import graphs, pipelines
from tests.view.builders import compared, measured


def test_caveats_of_the_peak_are_in_the_document_of_every_run() -> None:
    plain = measured()
    assert document(plain)["caveats"] == ()
    assert plain.allocations is not None
    log = msgspec.structs.replace(plain.allocations, ops=(*plain.allocations.ops, "aten::mkldnn_rnn_layer"))
    recurrent = msgspec.structs.replace(plain, allocations=log)
    (caveat,) = document(recurrent)["caveats"]
    assert "oneDNN" in caveat
    both = document(msgspec.structs.replace(compared(), candidate=recurrent))
    assert both["candidate"]["caveats"] == (caveat,) and both["baseline"]["caveats"] == ()


GRAPH = graphs.gpt(4)
PLAN = pipelines.planned(GRAPH)


def printed(capsys: pytest.CaptureFixture[str], cap_bytes: int | None = None, **changes: object) -> str:
    run = replace(pipelines.ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN), n_moved=2), **changes)
    joint = None if cap_bytes is None else JointPlan(
        plan=PLAN, policy=Policy(), cap_bytes=cap_bytes, makespan_ms=1.0, rank_bytes=(1,), cuts_first_ms=None,
        n_judged=1,
    )  # fmt: skip
    print_pipeline(run, joint)
    return capsys.readouterr().out


def test_every_rank_and_every_share_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    run = pipelines.ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN), n_moved=2)
    text = printed(capsys)
    assert run.timing is not None and f"step {run.timing.makespan_ms:.1f} ms measured actions, composed" in text
    assert all(memory.peak_action in text for memory in run.memory)
    n = len(run.gradients)
    (row,) = [line.split() for line in text.splitlines() if "moved by splitting" in line]
    assert row[3:8] == [str(n - 2), "of", str(n), "0", "2"], "bitwise equal, by rounding, different"
    assert all(note in text for note in run.notes)


def test_wall_time_is_said_to_be_that(capsys: pytest.CaptureFixture[str]) -> None:
    composed = pipelines.ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN)).composed
    assert "wall time of the ranks, links included" in printed(capsys, wall=composed)


def test_a_cap_is_kept_or_missed(capsys: pytest.CaptureFixture[str]) -> None:
    most = fullest_bytes(pipelines.ran(GRAPH, RunSpec(model=GRAPH.model, plan=PLAN)).memory)
    assert " kept: the fullest rank holds " in printed(capsys, cap_bytes=most)
    assert " missed: rank " in printed(capsys, cap_bytes=most - 1)


def test_a_run_without_times_prints_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, composed=None, gradients=())
    assert "step" not in text and "moved by" not in text and "2 stages" in text
