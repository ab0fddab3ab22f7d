"""A pipelined run as a report: what its page says, and every action at its time."""

from __future__ import annotations

from explorer.view.pipeline.headline import figures
from tests.view.report.kinds import pipelined
from tests.view.report.read import figures_in, text_of


def test_a_pipeline_says_what_its_strip_says() -> None:
    run, text = pipelined(), text_of("pipeline")
    for figure in figures(run, None, run.spec.plan, before=None):
        assert figure.value in text and figure.label in text
    for part in ("Schedule", "Memory", "Gradients", "Calls", "Hazards", "Environment"):
        assert f"<h2>{part}</h2>" in text
    assert all(note in text for note in run.notes)
    assert "actions-of-the-schedule" in figures_in(text)
