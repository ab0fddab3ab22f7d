"""A pipelined run as a report: what its page says, and every action at its time."""

from __future__ import annotations

import pytest

from explorer.view.pipeline.headline import figures
from tests.view.report.kinds import pipelined
from tests.view.report.read import boxes, drawn, text_of


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
