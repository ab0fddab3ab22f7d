"""Every chart is a value: a picture, words of its own, and the same numbers as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer import slices
from explorer.plan.memory.ledger import held, held_by_role, ledger
from explorer.plan.names import is_within
from explorer.plan.predict.forecaster import prices, prices_of_keeping
from explorer.plan.why.peak import explain
from explorer.record import ROLES, Comparison, Measurement
from explorer.record.base import from_json, from_msgpack, to_json
from explorer.view.compare.cost import recompute_cost, recompute_time, step_time
from explorer.view.compare.front import front_chart
from explorer.view.compare.gradients import gradient_chart
from explorer.view.compare.headline import headlines
from explorer.view.drawing.figure import Chart, literal, written
from explorer.view.memory.blocks import ledger_chart, saved_bytes_chart
from explorer.view.memory.stacked import roles
from explorer.view.memory.timeline import timeline
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
    if "pipeline" not in slices.names():
        return []
    from tests.pipeline.view import test_pipeline

    return test_pipeline.of_a_pipeline(names)


@cache
def all_charts() -> list[Chart]:
    return [*of_a_comparison(compared(recompute=range(6))), *of_a_pipeline(), front_chart(MARKS)]


def test_no_two_charts_share_their_words() -> None:
    n_by_words = Counter(chart.alt for chart in all_charts())
    assert not [alt for alt, n in n_by_words.items() if n > 1]
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


GOLDEN = sorted((Path(__file__).resolve().parent.parent / "golden").glob("*.msgpack"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def pair(request: pytest.FixtureRequest) -> Comparison:
    return from_msgpack(request.param.read_bytes(), Comparison)


@pytest.fixture(params=["baseline", "candidate"])
def run(pair: Comparison, request: pytest.FixtureRequest) -> Measurement:
    return getattr(pair, request.param)


def test_roles_add_up_at_every_tick(run: Measurement) -> None:
    log = run.allocations
    assert (held_by_role(log).sum(axis=0) == held(log)).all()
    assert held(log).tolist() == log.held_bytes.tolist()
    assert ledger(run).total_bytes == run.step_peak_bytes == log.held_bytes[log.peak_tick]
    assert run.phases[0].first_tick <= 1 and run.phases[-1].end_tick == log.n_ticks + 1
    assert all(one.end_tick == other.first_tick for one, other in zip(run.phases, run.phases[1:])), "no gaps"


def test_recomputed_for_exactly_the_chosen_blocks(pair: Comparison) -> None:
    again = ROLES.index("recomputed")
    assert not held_by_role(pair.baseline.allocations)[again].any()
    log = pair.candidate.allocations
    chosen = pair.candidate.spec.policy.blocks
    recomputed = {log.blocks[block] for block, role in zip(log.block, log.role) if role == again}
    assert recomputed and all(any(is_within(fqn, block) for block in chosen) for fqn in recomputed)
    assert all(pair.candidate.by_fqn[block].n_recompute == 1 for block in chosen)
    assert pair.candidate.step_peak_bytes < pair.baseline.step_peak_bytes
    assert pair.candidate.total_flops > pair.baseline.total_flops and pair.verdict == "bitwise equal"


def test_every_chart_draws_it(pair: Comparison) -> None:
    figures = [
        timeline(pair.baseline, pair.candidate).figure,
        timeline(pair.baseline, pair.candidate, axis="time").figure,
        roles(pair.candidate).figure,
        roles(pair.candidate, block="blocks.2").figure,
        ledger_chart(ledger(pair.candidate)).figure,
        saved_bytes_chart(pair).figure,
        recompute_cost(pair).figure,
        recompute_time(pair).figure,
        step_time(pair).figure,
    ]
    for fig in figures:
        assert len(fig.data) > 0, fig.layout.title.text
        assert len(fig.to_json()) < 600_000
    assert "bitwise equal" in gradient_chart(pair).figure.layout.annotations[0].text
    line = next(t for t in figures[0].data if t.name == "candidate" and t.mode == "lines+markers")
    assert np.max(line.y) * 1024**2 == pytest.approx(pair.candidate.step_peak_bytes, rel=1e-12)


def test_it_is_explained_and_priced(pair: Comparison) -> None:
    assert explain(pair)[0].startswith("The policy lowered the peak from")
    assert {head.key for head in headlines(pair)} >= {"step_peak_bytes", "verdict", "flop_ratio"}
    (price,) = prices(pair.candidate, ["blocks.1"])
    kept = {price.blocks[0]: price for price in prices_of_keeping(pair.candidate)}
    assert price.peak_change_bytes < 0 < kept["blocks.0"].peak_change_bytes


def test_a_price_comes_true(pair: Comparison) -> None:
    """The candidate recomputes two blocks; both prices of the baseline together are the measured gain."""
    alone = prices(pair.baseline, ["blocks.0", "blocks.2"])
    gain = pair.candidate.step_peak_bytes - pair.baseline.step_peak_bytes
    assert sum(price.peak_change_bytes for price in alone) == pytest.approx(gain, rel=0.01)
