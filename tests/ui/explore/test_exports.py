"""The policy that is drawn goes out to any target; what would be lost is said, and can be drawn and taken back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from explorer.plan.export.formats import FORMATS
from tests.ui.page_driver import graph_data, say, settle, texts

App = Callable[..., AppTest]
SOME = [f"blocks.{i}" for i in (1, 3)]


def choose(at: AppTest, target: str) -> AppTest:
    return settle(at.selectbox(key="export_target").set_value(target).run())


@pytest.mark.parametrize("target", FORMATS)
def test_every_target_answers_what_is_drawn(app: App, target: str) -> None:
    at = choose(say(app(), on=SOME), target)
    words = texts(at)
    pipeline_only = target in ("stages", "schedule", "megatron-layout")
    assert ("holds no pipeline plan" in words) is pipeline_only
    if not pipeline_only:
        assert any(f"badge[{fit}]" in words for fit in ("exact", "approximated", "not expressible"))


def test_what_a_target_really_does_is_drawn_and_undone(app: App) -> None:
    """Megatron's flags name the first layers of a stage: they cannot skip one."""
    at = choose(say(app(), on=SOME), "megatron")
    assert "badge[approximated]" in texts(at)
    at = settle(at.button(key="draw_export").click().run())
    assert graph_data(at)["on"] == ["blocks.0", "blocks.1"]
    at = settle(next(b for b in at.button if b.key and b.key.partition("~")[0] == "undo").click().run())
    assert graph_data(at)["on"] == SOME
