"""The page that a report stands on: one file, nothing fetched, no script but its own, no markup out of a name."""

from __future__ import annotations

import re
from html import escape

import pytest

from explorer.record import Comparison
from explorer.record.lab import LabChart, LabOutcome, LabSeries
from explorer.view.compare.gradients import gradient_chart
from explorer.view.lab import lab_chart
from explorer.view.memory.timeline import timeline
from explorer.view.report.html import document, picture, plotly_js
from explorer.view.report.report import report_text
from tests.view.builders import Chain, compared
from tests.view.report.kinds import KINDS
from tests.view.report.read import MOST_BYTES, besides_plotly, figures_in, of, text_of


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_small_file_that_fetches_nothing(kind: str) -> None:
    text = text_of(kind)
    assert len(text.encode()) < MOST_BYTES and "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe)|@import|url\((?!#)|src=|https?://", text)
    assert "<b>no</b>" not in text and "<i>chains</i>" not in text
    assert figures_in(text) or "<figure" not in text


def test_scripts_run_by_a_nonce_that_no_text_in_the_body_can_name(pair: Comparison) -> None:
    text = besides_plotly(report_text(of(pair)))
    nonce = re.search(r"script-src 'nonce-([0-9a-f]{32})'; img-src data: blob:\"", text)
    assert nonce is not None
    assert re.findall(r"<script(?! type=\"application/json\")([^>]*)>", text) == [f' nonce="{nonce[1]}"'] * 2
    again = document("t", [f'<script nonce="{nonce[1]}">alert(1)</script>'])
    assert f"nonce-{nonce[1]}" not in again
    assert report_text(of(pair)) == report_text(of(pair)) != report_text(of(pair.candidate))


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


def test_a_deep_model_stays_small() -> None:
    deep = compared(Chain(n_blocks=200), recompute=range(0, 200, 2))
    assert len(besides_plotly(report_text(of(deep))).encode()) < MOST_BYTES


def test_names_of_a_model_end_no_script() -> None:
    wild = LabSeries(name="</script><script>alert(1)</script>", y=(1.0, None), part="other")
    chart = LabChart(kind="bars", title="a < b & c", x_title="", y_title="n", x=("<b", "q&"), series=(wild, wild))
    outcome = LabOutcome(
        experiment="x", switches={}, device="cpu", rows=(), chart=chart, findings=('say "no"',), seconds=1.0
    )
    markup = picture(lab_chart(outcome))
    assert markup.count("<script") == markup.count("</script>") == 1
    assert len(figures_in(markup)) == 1
