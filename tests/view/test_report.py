"""Reports of every kind of record as one HTML file."""

from __future__ import annotations

import json
import pickle
import re
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from explorer.engine.bench.measure import measure_and_describe
from explorer.errors import UnreadableFile
from explorer.jobs import run_file
from explorer.plan.card.opened import open_history
from explorer.plan.memory.ledger import ledger
from explorer.record import Comparison, Failure, Measurement, ModelRef, Policy, RunSpec, Unit
from explorer.record.base import Record, from_msgpack, from_plain
from explorer.record.run import RunOfSlice
from explorer.ui.runs.table import stored_peak, stored_time
from explorer.view.compare.cost import time_answer
from explorer.view.compare.gradients import gradient_chart, mask_table, rng_table, seal, state_change_table
from explorer.view.compare.headline import headlines
from explorer.view.drawing.figure import Chart
from explorer.view.graph.geometry import layout
from explorer.view.graph.labels import Facts, distances_by_block, labels
from explorer.view.memory.blocks import ledger_chart, operators_chart
from explorer.view.memory.stacked import by_block, roles
from explorer.view.memory.timeline import timeline
from explorer.view.report.explorable import OTHER_POLICY, Exhibit, Explorable, explorable, index_text
from explorer.view.report.html import document, picture, plotly_js, table
from explorer.view.report.report import ReportOf, environment, failure_boxes, report_text
from explorer.view.text.runs import conditions, figures_of, refusal_rows, stored_flops
from tests import graphs, mutations
from tests.graphs import GRAPH
from tests.plan.card.histories import small_document
from tests.view.builders import compared, measured
from tests.view.reports import KINDS, MOST_BYTES, besides_figures, besides_plotly, figures_in, of, text_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cpu.msgpack"


@pytest.fixture(scope="session")
def pair() -> Comparison:
    return from_msgpack(GOLDEN.read_bytes(), Comparison)


@pytest.fixture(scope="session")
def whole(pair: Comparison) -> str:
    """The report of the golden comparison."""
    return report_text(of(pair))


RUN = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))


def test_the_graph_of_the_run_comes_before_one_at_hand() -> None:
    recorded = replace(RUN, graph=GRAPH)
    assert ReportOf(run=RUN, name="n").known_graph is None
    assert ReportOf(run=recorded, name="n").known_graph is GRAPH
    other = graphs.gpt(1)
    assert ReportOf(run=recorded, name="n", graph=other).known_graph is GRAPH
    assert ReportOf(run=RUN, name="n", graph=other).known_graph is other
    failure = Failure(kind="crash", sentence="It broke.", hint="Mend it.")
    assert len(list(failure_boxes([failure, None, failure]))) == 1, "a failure that several ranks had is said once"


@pytest.mark.parametrize("origin", ["measured", "recorded"])
def test_a_recorded_step_says_nothing_that_nobody_saw(origin: str) -> None:
    run = replace(RUN, origin=origin, spec=replace(RUN.spec, optimizer="none"))
    text = "".join(environment(run.environment, run.spec, run))
    assert all((f"<td>{name}</td>" in text) == (origin == "measured") for name in ("seed", "timed steps", "optimizer"))
    assert "<td>torch</td>" in text and "<td>types</td>" in text


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_small_file_that_fetches_nothing(kind: str) -> None:
    text = text_of(kind)
    assert len(text.encode()) < MOST_BYTES and "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe)|@import|url\((?!#)|src=|https?://", text)
    assert "<b>no</b>" not in text and "<i>chains</i>" not in text
    assert figures_in(text) or "<figure" not in text


def test_scripts_run_by_a_nonce_that_no_text_in_the_body_can_name(pair: Comparison, whole: str) -> None:
    text = besides_plotly(whole)
    nonce = re.search(r"script-src 'nonce-([0-9a-f]{32})'; img-src data: blob:\"", text)
    assert nonce is not None
    assert re.findall(r"<script(?! type=\"application/json\")([^>]*)>", text) == [f' nonce="{nonce[1]}"'] * 2
    again = document("t", [f'<script nonce="{nonce[1]}">alert(1)</script>'])
    assert f"nonce-{nonce[1]}" not in again
    assert report_text(of(pair)) == whole


def test_plotly_stands_once_in_the_file_or_beside_it(pair: Comparison) -> None:
    charts = [picture(timeline(pair.baseline, pair.candidate)), picture(gradient_chart(pair))]
    assert document("t", charts).count(plotly_js()) == 1
    shared = document("t", charts, share_plotly=True)
    assert plotly_js() not in shared and shared.count('src="plotly.min.js"') == 1
    assert "<script" not in document("t", ["<p>no chart</p>"])


def test_a_figure_is_the_one_of_the_page(pair: Comparison) -> None:
    chart = timeline(pair.baseline, pair.candidate)
    markup = picture(chart)
    figure = figures_in(markup)["memory-timeline"]
    assert escape(chart.alt) in markup
    assert [trace.get("name") for trace in figure["data"]] == [trace.name for trace in chart.figure.data]
    assert figure["layout"]["title"]["text"] == chart.figure.layout.title.text
    assert "template" not in figure["layout"] and chart.figure.layout.template.layout.colorway


def test_it_says_what_the_strip_says_and_every_part_is_there(pair: Comparison, whole: str) -> None:
    text = whole
    for figure in headlines(pair):
        assert figure.value in text and figure.label in text
    for part in ("Memory", "Blocks", "Cost", "Verdict", "Hazards", "Environment"):
        assert f"<h2>{part}</h2>" in text and f'href="#{part.lower()}"' in text
    assert "The policy lowered the peak" in text and "bitwise equal" in text
    assert pair.candidate.environment.torch_version in text
    assert len(figures_in(text)) == 10
    alone = report_text(of(pair.candidate))
    assert "<h2>Memory</h2>" in alone and "<h2>Verdict</h2>" not in alone and "<h2>Cost</h2>" not in alone
    assert list(figures_in(alone)) == [
        "memory-timeline", "bytes-by-role", "bytes-by-block", "alive-at-the-peak", "saved-bytes-by-block",
        "operators-of-the-model",
    ]  # fmt: skip
    host = replace(pair.candidate.environment, device_name="<i>")
    text = report_text(of(Measurement(spec=pair.candidate.spec, environment=host)))
    assert "not measured" in text and "&lt;i&gt;" in text and "<h2>Memory</h2>" not in text, "without a timeline"


def test_a_run_that_failed_says_so_and_looks_in_no_part_whole(pair: Comparison) -> None:
    failure = Failure(kind="out of memory", sentence="The step asked for 8 bytes.", hint="Recompute more.")
    text = report_text(of(replace(pair, candidate=replace(pair.candidate, failure=failure))))
    assert "The step asked for 8 bytes." in text and "Recompute more." in text
    assert "nothing is bought, and nothing is proven" in text
    assert "<h2>Cost</h2>" not in text and "The policy lowered the peak" not in text


def test_the_report_of_a_recorded_step_says_recorded_and_why(pair: Comparison) -> None:
    run = replace(pair.candidate, origin="recorded", recorded_in="train.py:42", times=None)
    text = report_text(of(run))
    cards = re.search(r'<div class="cards">.*?</div></div>', text, re.S)
    assert cards is not None and ">recorded<" in cards[0] and ">measured<" not in cards[0]
    assert "recorded by the same instruments in one step of a script" in text
    assert "The peak of 2.5 MiB lies at the start of backward; it is made of" in text
    assert "baseline" not in besides_figures(text)
    lines = figures_in(text)["memory-timeline"]["data"]
    assert any(line.get("name") == "this run" for line in lines)
    assert all("baseline" not in line.get("name", "") + line.get("hovertemplate", "") for line in lines)
    assert "<td>seed</td>" not in text and "<td>timed steps</td>" not in text and "<td>mode</td>" in text
    run = replace(pair.baseline, origin="predicted", times=None, warnings=("What kernels take is not in it.",))
    text = report_text(of(run))
    cards = re.search(r'<div class="cards">.*?</div></div>', text, re.S)
    assert cards is not None and ">predicted<" in cards[0]
    assert ">measured<" not in cards[0] and ">counted<" not in cards[0]
    assert "Every figure is predicted" in text and "measured by a clock" not in text
    assert "Warning: What kernels take is not in it." in text


FOUR = graphs.gpt(4)
RECORDS: dict[str, Any] = {
    **KINDS,
    "measurement": run_file.with_graph(measured(), FOUR),
    "comparison": run_file.with_graph(compared(), FOUR),
}
PLACES = [(name, path, kind) for name, record in RECORDS.items() for path, kind in mutations.places(record)]
LARGEST = len(plotly_js()) + 1_000_000
"""Letters of a report of these small runs, whatever one field says."""


def opened(document: Any, kind: type[Record], created: float = 1.0) -> Any:
    """The record in a file that holds `document`. Raises UnreadableFile."""
    stored = run_file.stored_record(from_plain(document, kind), "n")
    read = run_file.read(run_file.write(msgspec.structs.replace(stored, created=created)))
    return from_msgpack(read.record, kind)


def draw(run: Any) -> None:
    text = report_text(ReportOf(run=run, name=run_file.name_of(run), created=1.0))
    assert len(text) < LARGEST
    draw_on_the_page(run)


def draw_on_the_page(run: Any) -> None:
    """What the page draws of a run beside its report: charts as figures, labels of the graph, words of its row."""
    charts: list[Chart] = []
    if hasattr(run, "headlines"):
        headlines = json.loads(json.dumps(run.headlines()))
        for stored in (headlines, headlines.get("candidate") or {}):
            assert f"{stored_flops(stored)}{stored_time(stored)}{stored_peak(stored)}".isprintable()
    for part in (run.baseline, run.candidate) if isinstance(run, Comparison) else [run]:
        if isinstance(part, Measurement):
            figures_of(part), conditions(part.spec)
            charts += [timeline(part, axis="time"), by_block(part, axis="time"), roles(part, block="layers.0")]
            charts += [operators_chart(part, cost.fqn) for cost in part.blocks[:2]]
            charts += [ledger_chart(ledger(part))] if part.allocations is not None else []
    if isinstance(run, Comparison):
        charts += [timeline(run.baseline, run.candidate, axis="time")]
        (seal(run), time_answer(run), rng_table(run), mask_table(run), state_change_table(run))
    if isinstance(run, RunOfSlice):
        from tests.pipeline.view.test_pipeline import charts_of

        charts += charts_of(run)
    if (graph := run_file.graph_of(run)) is not None:
        spec, whole = run.spec if not isinstance(run, Comparison) else run.candidate.spec, isinstance(run, Comparison)
        labels(Facts(graph=graph, policy=spec.policy, distances=distances_by_block(run if whole else None)))
        layout(graph, [block.fqn for block in graph.blocks])
    for chart in charts:
        assert chart.alt and chart.plotted().to_json() and list(chart.rows()) is not None


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_what_passes_is_drawn(data: st.DataObject) -> None:
    name, path, kind = data.draw(st.sampled_from(PLACES))
    values = mutations.values(kind, mutations.at(RECORDS[name], path))
    if not values:
        return
    document = mutations.changed(RECORDS[name], path, data.draw(st.sampled_from(values)))
    try:
        run = opened(document, type(RECORDS[name]))
    except UnreadableFile as error:
        assert len(str(error)) < 1000
        return
    draw(run)


FORGED: list[tuple[str, tuple[str | int, ...], Any]] = [
    ("ranks", ("n_ranks",), 2**31),
    ("ranks", ("n_ranks",), 10**6),
    ("ranks", ("ranks",), []),
    ("measurement", ("spec", "n_repeats"), 10**18),
    ("measurement", ("spec", "n_threads"), -1),
    ("comparison", ("candidate", "spec", "seed"), 2**62),
    ("comparison", ("candidate", "spec", "policy", "units", 0, "blocks"), []),
    ("measurement", ("graph", "blocks"), []),
    ("measurement", ("graph", "chain"), ["nowhere"]),
    ("measurement", ("environment", "total_memory_bytes"), -5),
    ("measurement", ("blocks", 0, "forward", "ms"), [float("nan")]),
]
if "pipeline" in RECORDS:
    FORGED += [
        ("pipeline", ("spec", "plan", "n_microbatches"), 10**9),
        ("pipeline", ("spec", "plan", "n_ranks"), 0),
        ("pipeline", ("composed", "ranks"), []),
        ("pipeline", ("composed", "actions", 0, "rank"), 10**5),
        ("pipeline", ("memory", 0, "held_bytes"), []),
    ]


@pytest.mark.parametrize(("name", "path", "value"), FORGED)
def test_what_cannot_have_happened_is_refused(name: str, path: tuple[str | int, ...], value: Any) -> None:
    opened(mutations.to_plain(RECORDS[name]), type(RECORDS[name]))
    with pytest.raises(UnreadableFile):
        opened(mutations.changed(RECORDS[name], path, value), type(RECORDS[name]))


def test_a_spec_at_its_limits_is_drawn_and_a_date_that_is_none_is_refused() -> None:
    for created in (1e300, float("inf"), -1e18, float("nan")):
        with pytest.raises(UnreadableFile, match="created"):
            opened(mutations.to_plain(RECORDS["ranks"]), type(RECORDS["ranks"]), created)
    spec = RECORDS["measurement"].spec
    largest = {"n_repeats": 1000, "n_threads": 1024, "seed": 2**53 - 1, "n_accumulation": 4096}
    assert set(largest) <= set(RunSpec.__struct_fields__)
    run = msgspec.structs.replace(RECORDS["measurement"], spec=msgspec.structs.replace(spec, **largest))
    draw(opened(mutations.to_plain(run), Measurement))


def test_ranks_stand_side_by_side_and_a_refused_one_has_no_peak() -> None:
    text = text_of("ranks")
    assert "Rank 1 holds most: at least 245.0 MiB, then refused" in text and "No file of rank 2." in text
    assert "<h2>Rank 1</h2>" in text and "The step held at least 245.0 MiB" in text and "149.0 MiB" in text
    figures = figures_in(text)
    lines = [trace.get("name") for trace in figures["ranks-over-the-step"]["data"]]
    assert {"rank 0", "rank 1"} <= set(lines)
    assert {name for trace in figures["peaks-of-the-ranks"]["data"] for name in trace["y"]} == {"rank 0", "rank 1"}


def test_a_history_says_its_peaks_under_each_option_its_refusals_and_what_was_alive() -> None:
    text = besides_figures(text_of("history"))
    for words in ("as recorded", "the same options, simulated", "expandable_segments:True", "block:31"):
        assert words in text, words
    small = open_history(pickle.dumps(small_document()), "a.pickle")
    (row,) = refusal_rows(small.devices[0])
    refused = besides_figures(report_text(of(small)))
    assert "".join(f"<th>{name}</th>" for name in row) in refused


def test_a_policy_that_the_page_does_not_replay_is_said() -> None:
    arguments = {"n_layers": 2, "width": 16, "batch": 4}
    spec = RunSpec(model=ModelRef(target="sample_models/mlp.py", size="small", arguments=arguments), n_repeats=0)
    run = measure_and_describe(spec)
    assert run.graph is not None
    replayed = Policy(units=(Unit(blocks=("1",)),))
    others = (Policy(units=(Unit(blocks=("1",), action="offload"),)), replace(replayed, use_reentrant=True))
    for policy in (Policy(), replayed, *others):
        text = explorable(Explorable(run=run, graph=run.graph, policy=policy))
        assert 'class="explorable"' in text and (escape(OTHER_POLICY) in text) == (policy in others)


def test_a_run_that_offloads_says_why_no_block_can_be_chosen() -> None:
    run = measured(recompute=[0])
    units = (Unit(blocks=("layers.0",), action="offload"),)
    offloading = replace(run, spec=replace(run.spec, policy=Policy(units=units)))
    sentence = "No block can be chosen in this file. Nothing is predicted from a run in which layers.0 keep"
    for step, is_there in ((offloading, True), (run, False)):
        assert (sentence in report_text(of(step))) == is_there


def test_a_long_table_says_how_many_rows_it_leaves_out() -> None:
    texts = [table([{"row": row} for row in range(n_rows)]) for n_rows in (60, 1261)]
    assert [(text.count("<td"), "and 1,201 more" in text) for text in texts] == [(60, False), (60, True)]


def test_the_first_page_of_the_gallery() -> None:
    index = index_text([Exhibit(file="a b.html", title="A <b>", line="what", shelf="Traps")])
    assert 'href="a b.html"' in index and "A &lt;b&gt;" in index and "<h2>Traps</h2>" in index
