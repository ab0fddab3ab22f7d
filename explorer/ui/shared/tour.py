"""The guided path: offered on a first visit, one step at a time, to be skipped, left and begun again at any moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import streamlit as st

from explorer import slices
from explorer.errors import ExplorerError
from explorer.plan.challenges import CHALLENGES, is_about, marks, peak_guesses
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.policy import RunningStats
from explorer.ui.session import backend
from explorer.ui.session.values import go_to, once_a_press, session_value
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft
from explorer.ui.shared.elements import escape, horizontal, small_text
from explorer.view.drawing.units import mib
from explorer.view.text.tour import NOTHING_RAN, OFFER, ON_GPT, STEPS, TourStep

GPT = ModelRef(target="sample_models/gpt.py", size="small")
_ON_GPT = ("see", "guess", "toggle", "run", "understand", "take")
RESNET = ModelRef(target="sample_models/resnet.py", size="small")
NAMES = {GPT.target: "GPT", RESNET.target: "ResNet"}
_TO_SEE = "A run will say whether it is true."
_AGAIN = "The Lab page begins it again."
HEIGHT = 180
"""Pixels that the panel of a usual step takes above the charts."""


@dataclass(slots=True, kw_only=True)
class Tour:
    """A visitor's position in the tour. Changed in place."""

    at: int | None = None
    """Number of the step; None: not on the path."""
    offered: bool = field(default_factory=lambda: _only_baselines_ran())
    guess: int | None = None
    """Guessed bytes."""
    n_units: int = 0
    """Units of the policy when the whole page was drawn last."""
    running_stats: RunningStats | None = None
    """The option that the BatchNorm step changes, as the step found it; None: the step is not open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPage:
    """Facts of a page that the steps of the tour use."""

    model: ModelRef
    """The drawn model."""
    is_pipeline: bool = False
    """True on the Pipeline page."""
    baseline: Measurement | None = None
    comparison: Comparison | None = None
    """The last comparison of the drawn policy."""
    predicted_bytes: int | None = None
    """The peak if every block is recomputed."""
    n_units: int = 0
    has_split: bool = False
    is_read: bool = True
    """False while the model is being read; no prediction exists before."""


def current() -> Tour:
    return session_value("tour", Tour, Tour)


def panel_height() -> int:
    """Pixels of height that the tour takes above the charts, about."""
    return HEIGHT if current().at is not None else 0


def begin() -> None:
    """Starts the tour at its first step, on the Explore page."""
    st.session_state["tour"] = Tour(at=0, offered=False)


def outdated(n_units: int) -> bool:
    """Whether a click in the graph has done or undone the task of the current step."""
    tour = current()
    asks = tour.at is not None and STEPS[tour.at].key == "toggle"
    return asks and (tour.n_units > 0) != (n_units > 0)


def tour_panel(on_page: OnPage, draft: Draft, choose_model: Callable[[ModelRef], None]) -> None:
    """Draws the current step; nothing if a person is not on the path."""
    tour = current()
    if tour.at is None:
        return
    step = STEPS[tour.at]
    if step.key == "batchnorm" and tour.running_stats is None:
        tour.running_stats = draft.spec.policy.running_stats
    with st.container(border=True, key="tour"):
        small_text(f":blue-badge[{tour.at + 1} of {len(STEPS)}] **{step.title}**")
        needed = GPT if step.key in _ON_GPT else None
        if step.key == "batchnorm":
            needed = RESNET
        is_elsewhere = needed is not None and (on_page.is_pipeline or on_page.model.target != needed.target)
        st.markdown(_text(step, on_page) if needed is not GPT or not is_elsewhere else ON_GPT)
        if needed is not None and is_elsewhere:
            _go(f"Open the {NAMES[needed.target]}", partial(_open, needed, on_page, choose_model))
        elif step.key == "guess":
            _question(tour, on_page)
        elif step.key == "split" and not on_page.is_pipeline:
            _go("Open Pipeline", lambda: None, page="pipeline")
        elif step.key == "challenge":
            _challenges(on_page, choose_model)
        _steps(tour, draft, is_done=_is_done(step.key, tour, on_page))


def _only_baselines_ran() -> bool:
    try:
        return all(run.kind == "measurement" for run in backend.store().list())
    except ExplorerError:  # the Runs page says why the store cannot be read
        return False


def tour_offer() -> None:
    """Draws the offer of the path, until a person takes or declines it."""
    tour = current()
    if tour.at is None and tour.offered:
        st.button("New here? Three minutes", key="tour_begin", icon=":material/school:", help=OFFER, on_click=begin)
        st.button("Not now", key="tour_decline", type="tertiary", on_click=_leave, args=(tour,))


def _leave(tour: Tour, draft: Draft | None = None) -> None:
    if draft is not None:
        _put_back(tour, draft)
    tour.at, tour.offered = None, False


def _move(tour: Tour, draft: Draft, by: int) -> None:
    _put_back(tour, draft)
    if tour.at is not None:
        tour.at = max(tour.at + by, 0)


def _put_back(tour: Tour, draft: Draft) -> None:
    """Sets the option of the BatchNorm step as the step found it."""
    before, tour.running_stats = tour.running_stats, None
    if before is not None and draft.spec.policy.running_stats != before:
        drafts.set_option(draft, drafts.graph_of(draft), "running_stats", before)


def _steps(tour: Tour, draft: Draft, *, is_done: bool) -> None:
    with st.container(horizontal=True, gap="small", key="tour_steps"):
        if tour.at:
            st.button("Back", key="tour_back", on_click=once_a_press(_move), args=(tour, draft, -1))
        if tour.at is not None and tour.at + 1 < len(STEPS):
            name, kind = ("Next", "primary") if is_done else ("Skip this step", "secondary")
            onward = once_a_press(_move)
            st.button(name, key="tour_next", type=kind, on_click=onward, args=(tour, draft, 1))  # type: ignore[arg-type]
        st.button(
            "Leave",
            key="tour_leave",
            type="tertiary",
            help=_AGAIN if "lab" in slices.names() else None,
            on_click=_leave,
            args=(tour, draft),
        )


def _is_done(key: str, tour: Tour, on_page: OnPage) -> bool:
    ran = on_page.comparison is not None
    done = {
        "guess": tour.guess is not None,
        "toggle": on_page.n_units > 0,
        "run": ran,
        "understand": ran,
        "batchnorm": on_page.comparison is not None and on_page.comparison.verdict == "state moved",
        "split": on_page.has_split,
    }
    return done.get(key, True)


def _text(step: TourStep, on_page: OnPage) -> str:
    """The step's text with the page's figures filled in; missing figures are named as missing."""
    run = on_page.comparison
    if step.key == "understand" and run is None:
        return NOTHING_RAN
    ratio = run.headlines()["time_ratio"] if run else None
    return step.text.format(
        model="a small GPT",
        peak=mib(on_page.baseline.step_peak_bytes if on_page.baseline else None),
        saved=mib(on_page.baseline.saved_after_forward_bytes if on_page.baseline else None),
        before=mib(run.baseline.step_peak_bytes if run else None),
        after=mib(run.candidate.step_peak_bytes if run else None),
        cost=f"×{ratio:.2f} of the time" if ratio else "time that was not measured",
        verdict=run.verdict if run else "not compared",
    )


def _question(tour: Tour, on_page: OnPage) -> None:
    """Four answers; the forecast is the key."""
    run, predicted = on_page.baseline, on_page.predicted_bytes
    if not on_page.is_read:
        small_text("The model is being read; the answers to choose from come in a moment.")
        return
    if run is None or run.step_peak_bytes is None or run.saved_after_forward_bytes is None or predicted is None:
        small_text("The peak of this model is not predicted; run it and see.")
        return
    guesses = peak_guesses(run.step_peak_bytes, run.saved_after_forward_bytes, predicted)
    with st.container(horizontal=True, gap="small", key="tour_guesses"):
        for guess in guesses:
            st.button(
                mib(guess.peak_bytes),
                key=f"tour_guess_{guess.peak_bytes}",
                on_click=setattr,
                args=(tour, "guess", guess.peak_bytes),
            )
    chosen = next((guess for guess in guesses if guess.peak_bytes == tour.guess), None)
    if chosen is not None:
        if chosen.right:
            st.success(f"Right. {chosen.because} {_TO_SEE}")
        else:
            st.info(f"Not {mib(chosen.peak_bytes)}. {chosen.because} The forecast is {mib(predicted)}. {_TO_SEE}")


def _challenges(on_page: OnPage, choose_model: Callable[[ModelRef], None]) -> None:
    for challenge in CHALLENGES.values():
        with horizontal(f"task_{challenge.name}"):
            st.markdown(f"**{challenge.task}**", width="stretch")
            if on_page.is_pipeline or on_page.model != challenge.model:
                open_it = partial(_open, challenge.model, on_page, choose_model)
                _go("Open its model", open_it, key=f"challenge_{challenge.name}")
        if on_page.comparison is not None and is_about(challenge, on_page.comparison):
            for mark in marks(challenge, on_page.comparison):
                sign = {True: ":green-badge[met]", False: ":red-badge[not met]", None: ":gray-badge[unknown]"}[mark.met]
                small_text(f"{sign} {mark.asked}: {escape(mark.found)}")
        if not on_page.is_pipeline and on_page.model == challenge.model:
            small_text(challenge.hint)


def _open(model: ModelRef, on_page: OnPage, choose_model: Callable[[ModelRef], None]) -> None:
    """Draws `model`; a model that is drawn already keeps its policy."""
    if on_page.model != model:
        choose_model(model)


def _go(label: str, act: Callable[[], None], *, key: str = "tour_open", page: str = "explore") -> None:
    def pressed() -> None:
        act()
        go_to(page)

    st.button(label, key=key, icon=":material/open_in_new:", on_click=once_a_press(pressed))
