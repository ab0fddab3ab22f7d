"""What every report has: one line of where and when, each failure once, and options that really were seen."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.record import Comparison, Failure, RunSpec
from explorer.view.report.parts import ReportOf, circumstances, environment, failure_boxes, model_in_words, page
from tests import graphs
from tests.graphs import GRAPH, SPEC
from tests.view.report.kinds import KINDS

RUN = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))


def test_the_spec_of_two_runs_is_the_candidates(pair: Comparison) -> None:
    assert ReportOf(run=pair, name="n").spec is pair.candidate.spec
    assert ReportOf(run=RUN, name="n").spec is RUN.spec


def test_the_graph_of_the_run_comes_before_one_at_hand() -> None:
    recorded = replace(RUN, graph=GRAPH)
    assert ReportOf(run=RUN, name="n").known_graph is None
    assert ReportOf(run=recorded, name="n").known_graph is GRAPH
    other = graphs.gpt(1)
    assert ReportOf(run=recorded, name="n", graph=other).known_graph is GRAPH
    assert ReportOf(run=RUN, name="n", graph=other).known_graph is other
    assert ReportOf(run=KINDS["pipeline"], name="n").known_graph is None


def test_links_go_to_the_parts_that_have_something_to_say() -> None:
    text = page(ReportOf(run=RUN, name="<b>"), ["head"], {"Memory": "<p>m</p>", "Cost": ""})
    assert '<a href="#memory">Memory</a>' in text and ">Cost<" not in text
    assert "<h1>&lt;b&gt;</h1>" in text


def test_where_and_when() -> None:
    of = ReportOf(run=RUN, name="n", created=0.0)
    line = circumstances(of, "gpt.py", RUN.environment)
    assert "gpt.py; " in line and f"torch {RUN.environment.torch_version}, 1970-01-01 00:00 UTC" in line
    assert circumstances(ReportOf(run=RUN, name="n"), "gpt.py", None) == '<p class="quiet">gpt.py</p>'
    assert model_in_words(SPEC) == " ".join(filter(None, (SPEC.model.target, SPEC.model.size)))


def test_a_failure_that_several_ranks_had_is_said_once() -> None:
    failure = Failure(kind="crash", sentence="It broke.", hint="Mend it.")
    assert len(list(failure_boxes([failure, None, failure]))) == 1


@pytest.mark.parametrize("origin", ["measured", "recorded"])
def test_a_recorded_step_says_nothing_that_nobody_saw(origin: str) -> None:
    run = replace(RUN, origin=origin, spec=replace(RUN.spec, optimizer="none"))
    text = "".join(environment(run.environment, run.spec, run))
    assert all((f"<td>{name}</td>" in text) == (origin == "measured") for name in ("seed", "timed steps", "optimizer"))
    assert "<td>torch</td>" in text and "<td>types</td>" in text
