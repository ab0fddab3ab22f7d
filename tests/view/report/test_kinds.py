"""Pipelines, matrices, arenas and ranks have reports too: small, closed, and with what their pages say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from explorer.view.pipeline.headline import figures
from explorer.view.report.parts import ReportOf
from explorer.view.report.report import charts_of, report_text
from explorer.view.report.svg import svg
from tests.view.report.kinds import GRAPH, KINDS, arena, matrix, pipelined, ranks
from tests.view.report.test_report import MOST_BYTES

NAMES = "{http://www.w3.org/2000/svg}"


def text_of(kind: str) -> str:
    return report_text(ReportOf(run=KINDS[kind], name=f"a {kind}", graph=GRAPH if kind == "pipeline" else None))


def drawn(kind: str, chart: str) -> ET.Element:
    return ET.fromstring(svg(charts_of(KINDS[kind])[chart]))


def boxes(tree: ET.Element) -> list[dict[str, float]]:
    """The bars, not the marks of the legend."""
    bars = [rect for rect in tree.iter(f"{NAMES}rect") if rect.find(f"{NAMES}title") is not None]
    return [{name: float(str(bar.get(name))) for name in ("x", "y", "width", "height")} for bar in bars]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_small_file_that_fetches_nothing(kind: str) -> None:
    text = text_of(kind)
    assert len(text.encode()) < MOST_BYTES and "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"'< ]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "<b>no</b>" not in text and "<i>chains</i>" not in text
    for chart in charts_of(KINDS[kind]).values():
        tree = ET.fromstring(svg(chart))
        assert tree.get("aria-label") == chart.alt and "nan" not in svg(chart)


def test_a_pipeline_says_what_its_strip_says() -> None:
    run, text = pipelined(), text_of("pipeline")
    for figure in figures(run, None, run.spec.plan, before=None):
        assert figure.value in text and figure.label in text
    for part in ("Schedule", "Memory", "Gradients", "Calls", "Hazards", "Environment"):
        assert f"<h2>{part}</h2>" in text
    assert all(note in text for note in run.notes)


def test_actions_stand_where_they_began_and_last_as_long_as_they_did() -> None:
    run = pipelined()
    assert run.timing is not None
    bars = boxes(drawn("pipeline", "actions-of-the-schedule"))
    thick = max(bar["height"] for bar in bars)
    main = [bar for bar in bars if bar["height"] > 0.9 * thick]
    scale = max(bar["x"] + bar["width"] for bar in main) / run.timing.makespan_ms
    parts = [(a.start_ms, a.recompute_ms) for a in run.timing.actions if a.recompute_ms]
    parts += [(a.start_ms + a.recompute_ms, a.duration_ms - a.recompute_ms) for a in run.timing.actions]
    told = sorted((bar["x"] / scale, bar["width"] / scale) for bar in main)
    assert len(told) == len(parts)
    for (start, length), (wanted, lasts) in zip(told, sorted(parts)):
        assert start == pytest.approx(wanted, abs=0.1) and length == pytest.approx(lasts, abs=0.2)


def test_every_cell_of_the_matrix_is_a_tile_with_its_word() -> None:
    tree = drawn("matrix", "derivatives-and-checkpointing")
    words = [" ".join(text.itertext()) for text in tree.iter(f"{NAMES}text")]
    assert len(boxes(tree)) == len(matrix().cells)
    assert "bitwise equal" in words and any("Error" in word for word in words)


def test_bouts_are_marks_with_their_spread_and_the_budget_is_a_line() -> None:
    text = svg(charts_of(arena())["arena"])
    assert text.count('class="spread"') == 2 and ">wrong<" in text and ">50 %<" in text
    assert "It plans &lt;i&gt;chains&lt;/i&gt;." in text_of("arena")


def test_ranks_stand_side_by_side_and_a_refused_one_has_no_peak() -> None:
    text = text_of("ranks")
    assert "Rank 1 holds most: at least 245.0 MiB, then refused" in text and "No file of rank 2." in text
    assert "<h2>Rank 1</h2>" in text and "The step held at least 245.0 MiB" in text and "149.0 MiB" in text
    lines = drawn("ranks", "ranks-over-the-step")
    words = ["".join(part.itertext()) for part in lines.iter(f"{NAMES}text")]
    assert {"rank 0", "rank 1"} <= set(words)
    assert len(boxes(drawn("ranks", "peaks-of-the-ranks"))) >= 2 * len(ranks().ranks)
