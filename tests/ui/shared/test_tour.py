"""The guided path: offered once, walked by doing, skipped at any moment, begun again in the lab."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest

from explorer.pipeline.ui import page as pipeline_page
from explorer.plan.challenges import CHALLENGES
from explorer.record.policy import Policy
from explorer.ui.explore import page
from explorer.ui.shared.tour import GPT, RESNET, Tour
from explorer.view.text.tour import ON_GPT, STEPS
from tests.ui.page_driver import App, press, say, settle, texts, widget

ALL = [f"blocks.{i}" for i in range(6)]


def where(at: AppTest) -> str:
    return next((step.key for step in STEPS if f"of {len(STEPS)}] **{step.title}**" in texts(at)), "")


def next_says(at: AppTest) -> str:
    return at.button(key="tour_next").label


def test_the_path_from_the_offer_to_the_marks(app: App) -> None:
    at = press(app(), "tour_begin")
    assert where(at) == "see" and "104.5 MiB" in texts(at)
    at = press(at, "tour_next")
    assert where(at) == "guess" and next_says(at) == "Skip this step"
    guesses = [button for button in at.button if (button.key or "").startswith("tour_guess_")]
    sizes = [int(button.key.rpartition("_")[2]) for button in guesses]
    assert len(guesses) >= 3 and sizes == sorted(sizes, reverse=True)
    at = settle(guesses[0].click().run())
    assert "The forecast is 34.5 MiB" in at.info[0].value and next_says(at) == "Next"
    right = next(button for button in at.button if button.label == "34.5 MiB")
    at = settle(right.click().run())
    assert at.success[0].value.startswith("Right.")
    at = press(at, "tour_next")
    assert where(at) == "toggle" and next_says(at) == "Skip this step"
    at = say(at, on=ALL)
    assert next_says(at) == "Next"
    at = press(press(at, "tour_next"), "run")
    assert where(at) == "run" and next_says(at) == "Next"
    at = press(at, "tour_next")
    assert "104.5 MiB became 34.5 MiB" in texts(at) and "*bitwise equal*" in texts(at)
    for key in ("take", "batchnorm", "split", "challenge"):
        at = press(at, "tour_next")
        assert where(at) == key
    assert "step peak at most 60.0 MiB: 34.5 MiB" in texts(at)
    assert "tour_next" not in [button.key for button in at.button]
    at = press(press(at, "tour_back"), "tour_leave")
    assert where(at) == "" and "tour_begin" not in [button.key for button in at.button]
    again = app()
    assert "tour_begin" not in [button.key for button in again.button], "something ran already"


def test_who_declines_is_left_alone(app: App) -> None:
    at = press(app(), "tour_decline")
    assert "tour_begin" not in [button.key for button in at.button] and where(at) == ""


def test_the_step_on_batchnorm_leaves_no_option_changed(app: App) -> None:
    at = app()
    for key in ("tour_next", "tour_back", "tour_leave"):
        at.session_state["tour"] = Tour(at=[step.key for step in STEPS].index("batchnorm"), offered=False)
        at = settle(at.run())
        settle(widget(at, "selectbox", "option_running_stats").select("every_forward").run())
        assert "changed options" in texts(at) and where(at) == "batchnorm"
        at = press(at, key)
        assert at.session_state["draft"].spec.policy == Policy() and "changed options" not in texts(at)


def test_a_step_offers_what_is_not_open_already(app: App) -> None:
    at = app()

    def offers(step: str) -> list[str]:
        at.session_state["tour"] = Tour(at=[step.key for step in STEPS].index(step), offered=False)
        settle(at.run())
        return [button.label for button in at.button if button.label.startswith("Open ")]

    assert offers("see") == [] and offers("batchnorm") == ["Open the ResNet"]
    assert offers("split") == ["Open Pipeline"]
    about = [challenge for challenge in CHALLENGES.values() if challenge.model == GPT]
    assert len(offers("challenge")) == len(CHALLENGES) - len(about) > 0
    assert about and all(challenge.hint in texts(at) for challenge in about), "a hint needs no run"
    offers("batchnorm")
    at.button(key="tour_open").click().run()
    assert at.session_state["draft"].spec.model == RESNET and where(at) == "batchnorm"
    at = app(model="sample_models/unet.py", size="small")
    for step in STEPS[:6]:
        assert offers(step.key) == ["Open the GPT"] and ON_GPT in texts(at) and where(at) == step.key


def test_a_page_opens_though_the_rerun_of_the_press_ends(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a plan arrives, or a run ends, while the page is drawn for the press."""
    at = app()
    at.session_state["tour"] = Tour(at=[step.key for step in STEPS].index("split"), offered=False)
    settle(at.run())
    ends = [True]
    monkeypatch.setattr(page, "outdated", lambda n_units: bool(ends) and ends.pop())
    monkeypatch.setattr(pipeline_page, "prepare", lambda split: None)
    at.button(key="tour_open").click().run()
    assert not at.exception and "pipeline" in at.session_state, "the Pipeline page was drawn"
    assert "go_to" not in at.session_state
    at.session_state["tour"] = Tour(at=[step.key for step in STEPS].index("challenge"), offered=False)
    at = at.run().button(key="challenge_gpt").click().run()
    assert "pipeline_run" not in [button.key for button in at.button] and where(at) == "challenge", "back on Explore"


def test_while_the_model_is_read_the_question_waits_and_says_so(app: App) -> None:
    app()  # the worker that this session is shown

    def script(is_read: bool) -> None:
        import streamlit as st

        from explorer.ui.shared import draft as drafts
        from explorer.ui.shared.tour import GPT, OnPage, Tour, tour_panel

        st.session_state["tour"] = Tour(at=1, offered=False)
        tour_panel(OnPage(model=GPT, is_read=is_read), drafts.current(), lambda model: None)

    def told(is_read: bool) -> str:
        at = AppTest.from_function(script, args=(is_read,)).run()
        assert not at.exception
        return texts(at)

    assert "being read" in told(False) and "being read" not in told(True) and "not predicted" in told(True)
