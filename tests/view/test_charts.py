"""Every chart is a value: a picture, words of its own, and the same numbers as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html import unescape
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.memory.ledger import ledger
from explorer.record import Comparison, ModelRef, RunSpec
from explorer.record.base import from_json, to_json
from explorer.view.compare.cost import recompute_cost, recompute_time, step_time
from explorer.view.compare.front import front_chart
from explorer.view.compare.gradients import gradient_chart
from explorer.view.drawing.figure import Chart, literal, written
from explorer.view.memory.blocks import ledger_chart, saved_bytes_chart
from explorer.view.memory.stacked import roles
from explorer.view.memory.timeline import timeline
from explorer.view.pipeline.gantt import gantt
from explorer.view.pipeline.ranks import bands_chart, memory_chart
from explorer.view.pipeline.shares import calls_chart, truth_chart
from tests import graphs, pipelines
from tests.view.builders import compared
from tests.view.test_compare import MARKS


def of_a_comparison(pair: Comparison, names: str = "layers") -> list[Chart]:
    base, candidate = pair.baseline, pair.candidate
    return [
        timeline(base),
        timeline(candidate),
        timeline(base, candidate),
        roles(base),
        roles(candidate),
        roles(candidate, block=f"{names}.2"),
        ledger_chart(ledger(base)),
        ledger_chart(ledger(candidate)),
        ledger_chart(ledger(candidate, 7)),
        saved_bytes_chart(base),
        saved_bytes_chart(pair),
        recompute_cost(pair),
        recompute_time(pair),
        step_time(pair),
        gradient_chart(pair),
    ]


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


@cache
def all_charts() -> list[Chart]:
    return [*of_a_comparison(compared(recompute=range(6))), *of_a_pipeline(), front_chart(MARKS)]


def test_no_two_charts_share_their_words() -> None:
    n_by_words = Counter(chart.alt for chart in all_charts())
    assert not [alt for alt, n in n_by_words.items() if n > 1]


def test_every_chart_has_a_table_and_a_name_for_it() -> None:
    for chart in all_charts():
        rows = chart.rows()
        assert rows and all(isinstance(row, dict) for row in rows), chart.alt
        assert chart.name and chart.figure.layout.title.text


HOSTILE = "<b>a</b><br>&lt;<i>&amp;<sup>x<extra>"
"""A name of a module that Plotly would read as tags and entities."""


def shown(value: Any) -> Any:
    """A figure with each text as a reader sees it: Plotly takes tags out first, then it reads entities."""
    if isinstance(value, str):
        return unescape(re.sub(r"<[^<>]*>", "", value.replace("<br>", "\n")))
    if isinstance(value, dict):
        return {key: shown(entry) for key, entry in value.items() if key != "template"}
    return [shown(entry) for entry in value] if isinstance(value, (list, tuple, np.ndarray)) else value


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple, np.ndarray)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from texts(entry)


def called(name: str) -> list[Chart]:
    """Every chart of runs whose layers are called `name`."""
    pair = to_json(compared(recompute=range(6))).decode().replace("layers", name)
    return [*of_a_comparison(from_json(pair.encode(), Comparison), name), *of_a_pipeline(name)]


def test_every_chart_shows_the_names_of_a_model_as_they_are_written() -> None:
    for plain, hostile in zip(called("layers"), called(HOSTILE), strict=True):
        expected = [text.replace("layers", HOSTILE) for text in texts(shown(plain.plotted().to_plotly_json()))]
        assert list(texts(shown(hostile.plotted().to_plotly_json()))) == expected, plain.alt


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"))))
def test_a_click_returns_the_name_that_was_drawn(name: str) -> None:
    assert "<" not in literal(name) and written(literal(name)) == name == unescape(literal(name))
