"""Open a model of yours: a field for a file, a name or a configuration, and fields for what has no default.

    a reference is typed ──▶ read as text: a fault stands below the field, several models become a choice
    Enter, or Open ──▶ the model joins the list of offered models, its code runs in the worker ──▶ the page draws it

model.py draws the list of models on offer, of which links may choose; this file adds to the list, and a link cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import streamlit as st

from explorer.errors import ExplorerError
from explorer.plan.local_models import choices_for, found_models, needed_arguments, typed_value
from explorer.record.graph import ModelRef
from explorer.ui.session import backend
from explorer.ui.session.page_job import PageJob
from explorer.ui.session.values import bound, session_value
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft
from explorer.ui.shared.elements import escape, on_primary, small_text
from explorer.ui.shared.model import arguments_form
from explorer.view.text import explore as glossary

KEY = "open_model"
SEARCH_AGAIN_S = 20.0


@dataclass(slots=True, kw_only=True)
class Opening:
    """What a visitor has typed into the panel. Changed in place."""

    text: str = ""
    choices: tuple[str, ...] = ()
    """The references that the text may mean."""
    target: str = ""
    """The chosen reference; empty: none can be opened yet."""
    fault: str = ""
    typed: dict[str, str] = field(default_factory=dict)
    """Values of arguments without a default, as they are typed, and of `weights`."""
    is_reading: bool = False
    """Open was pressed, and the worker has neither read the model nor failed."""
    n_read: int = 0
    """How many models were read."""
    is_opened: bool = False
    """The page has to be drawn for another model."""


@st.cache_data(show_spinner=False, ttl=SEARCH_AGAIN_S, max_entries=1)
def _in_this_folder() -> tuple[str, ...]:
    return found_models(Path())


def open_model(draft: Draft, job: PageJob) -> None:
    """Draws the button and its panel; `job` is the job of the page, whose failure stands beside the fields too."""
    st.fragment(_panel)(draft, job)


def _panel(draft: Draft, job: PageJob) -> None:
    opening = session_value("opening", Opening, Opening)
    if opening.is_opened:
        opening.is_opened = False
        st.rerun()
    is_drawn = draft.spec.model.target == opening.target
    if opening.is_reading and is_drawn and (drafts.graph_of(draft) is not None or job.run_failed):
        opening.is_reading = False
        opening.n_read += not job.run_failed
    key = f"{KEY}~{opening.n_read}"  # another panel, which is closed, makes room for the model
    panel = st.popover(glossary.OPEN_MODEL, icon=":material/folder_open:", key=key, on_change="rerun")
    if not panel.open:
        return
    with panel:
        small_text(glossary.OPEN_RIGHTS)
        if not backend.may_open():
            st.warning(glossary.OPEN_ELSEWHERE, icon=":material/lock:")
            return
        _reference(opening, draft)
        if opening.fault:
            st.error(escape(opening.fault), icon=":material/error:")
        if len(opening.choices) > 1:
            _choice(opening, draft)
        if opening.target:
            _needed(opening, draft)
        if is_drawn:
            _state(opening, draft, job)


def _reference(opening: Opening, draft: Draft) -> None:
    offered = dict.fromkeys([opening.text, *backend.recent_models(), *_in_this_folder()])
    options = [text for text in offered if text]
    shown = bound("open_text", opening.text or None, partial(_take_text, opening, draft))
    st.selectbox(
        glossary.OPEN_FIELD,
        options,
        options.index(opening.text) if opening.text else None,
        placeholder=glossary.OPEN_EXAMPLES,
        help=glossary.OPEN_HELP,
        accept_new_options=True,
        **shown.wired,
    )


def _take_text(opening: Opening, draft: Draft, text: str | None) -> None:
    """Reads the file behind `text`; opens the model at once if nothing is left to choose or to fill in."""
    opening.text, opening.fault, opening.choices, opening.target = (text or "").strip(), "", (), ""
    if not opening.text:
        return
    try:
        opening.choices = choices_for(opening.text)
    except ExplorerError as error:
        opening.fault = str(error)
        return
    if len(opening.choices) == 1:
        _take_target(opening, draft, opening.choices[0])


def _take_target(opening: Opening, draft: Draft, target: str) -> None:
    opening.target, opening.typed = target, {}
    if not _missing(opening):
        _open(opening, draft)


def _missing(opening: Opening) -> list[str]:
    """Arguments without a default and without a typed value."""
    return [name for name in needed_arguments(opening.target) if not opening.typed.get(name)]


def _choice(opening: Opening, draft: Draft) -> None:
    def take(target: str | None) -> None:
        if target is not None:
            _take_target(opening, draft, target)

    shown = bound("open_choice", opening.target or None, take)
    st.pills(
        glossary.OPEN_CHOICE,
        opening.choices,
        format_func=lambda target: target.partition(":")[2],
        default=shown.value,
        **shown.wired,
    )


def _needed(opening: Opening, draft: Draft) -> None:
    """Fields for what has no default, one for a file with weights, and the button."""
    names = needed_arguments(opening.target)
    keys = {name: f"open_{opening.target}_{name}" for name in (*names, "weights")}

    def press() -> None:
        opening.typed = {name: st.session_state[key].strip() for name, key in keys.items()}
        _open(opening, draft)

    with st.form("open_form", border=False):
        for name, key in keys.items():
            st.text_input(name, key=key, placeholder=glossary.OPEN_WEIGHTS if name == "weights" else "no default")

        st.form_submit_button(on_primary("Open"), type="primary", icon=":material/check:", on_click=press)


def _open(opening: Opening, draft: Draft) -> None:
    """Offers the model on this server from now on, and draws it."""
    opening.fault = ""
    weights = opening.typed.get("weights", "")
    if missing := _missing(opening):
        opening.fault = f"{opening.target} needs {', '.join(missing)}, without a default: a number, a word or [8, 16]."
    elif weights and not Path(weights).expanduser().is_file():
        opening.fault = f"There is no file {weights} to read weights from."
    if opening.fault or not backend.may_open():
        return
    arguments = {name: typed_value(text) for name, text in opening.typed.items() if name != "weights" and text}
    weights = str(Path(weights).expanduser().resolve()) if weights else ""
    model = ModelRef(target=opening.target, arguments=arguments, weights=weights)
    if model not in backend.opened():
        backend.opened().insert(0, model)
    drafts.choose_model(draft, backend.in_default_size(model))
    opening.is_reading = opening.is_opened = True


def _state(opening: Opening, draft: Draft, job: PageJob) -> None:
    """What came of the model that was opened last, and its numbers, which may mend it."""
    model, graph = draft.spec.model, drafts.graph_of(draft)
    if job.run_failed and job.failure is not None:
        st.error(escape(f"{job.failure.sentence} {job.failure.hint}"), icon=":material/error:")
    elif graph is not None:
        small_text(f":green-badge[:material/check: open] {glossary.OPEN_BATCH.format(escape(graph.batch))}")
    elif opening.is_reading:
        small_text(f":material/hourglass_top: {glossary.GRAPH_FOLLOWS}")
    sample = backend.sample_of(model)
    if sample is not None and sample.usual(model.size):
        st.caption(glossary.OPEN_NUMBERS)

        def choose(changed: ModelRef) -> None:
            drafts.choose_model(draft, changed)
            opening.is_reading = opening.is_opened = True

        arguments_form(sample, model, choose, key="open_argument")
