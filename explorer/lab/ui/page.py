"""The Lab page: choose from a gallery, read a story, flip its switches, run the experiment, see the findings.

    experiment, story, switches, Run   |   take-aways, chart, table

A button starts a run. On the first visit the open experiment runs without a press, so that no panel is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import streamlit as st

from explorer.jobs.client import Job
from explorer.lab.jobs import RunLab
from explorer.lab.plan import lesson_called, lessons, settings
from explorer.lab.record import LabOutcome, Lesson, LessonPicture
from explorer.lab.view.glossary import GLOSSARY
from explorer.lab.view.outcome import lab_chart, lab_origins, recorded_pictures, sketch
from explorer.record.run import Device
from explorer.ui.session import address, backend, page_job, window
from explorer.ui.session.page_job import PageJob
from explorer.ui.session.repository import request_key, runs
from explorer.ui.session.values import bound, go_to, once_a_press, select, session_value, whole
from explorer.ui.shared import tour
from explorer.ui.shared.charts import picture
from explorer.ui.shared.elements import escape, frame, last_failure, small_text
from explorer.ui.shared.run_bar import RunBar, run_bar
from explorer.view.text.tour import OFFER

TITLE, ICON, PLACE = "Lab", ":material/science:", 2
CARD_WIDTH = 300
ORIGINS = {
    "counted": "Counted exactly: operations, calls, tensors.",
    "measured": "Read off this run: values of tensors, or the allocator's own events.",
}


@dataclass(slots=True, kw_only=True)
class LabState:
    """A visitor's choices in the lab. The page changes the state in place."""

    name: str = field(default_factory=lambda: lessons()[0].name)
    """Name of the open experiment."""
    switches: dict[str, dict[str, str]] = field(default_factory=dict)
    """Positions of the switches, by experiment."""
    device: Device = "cpu"
    shown: dict[str, str] = field(default_factory=dict)
    """Key of the last outcome, by experiment."""
    in_gallery: bool = True
    """Whether all experiments are shown instead of one."""
    visited: bool = False
    """Whether the open experiment was run without a press."""
    job: PageJob = field(default_factory=PageJob)


def page() -> None:
    """The whole page."""
    with whole():
        state = session_value("lab", LabState, _first)
        page_job.attach(state.job, "lab")
        page_job.settle(state.job, partial(_take, state))
    if state.in_gallery:
        _gallery(state)
        return
    left, right = (st.container(), st.container()) if window.narrow() else st.columns([5, 7], gap="large")
    with left, st.container(horizontal=True):
        back = partial(setattr, state, "in_gallery", True)
        st.button("All experiments", key="lab_gallery", type="tertiary", icon=":material/grid_view:", on_click=back)
        _guided_path()
    with left:
        lesson = _choice(state)
        request = _switches(state, lesson)
        if not state.visited:
            state.visited = True
            if state.job.failure is None and _outcome(request) is None:
                page_job.start(state.job, request)
        run_bar(
            state.job,
            RunBar(
                key="lab_",
                help="Runs the experiment now, with the switches as they stand. It takes seconds.",
                ready=True,
                start=lambda: page_job.start(state.job, request),
                take=partial(_take, state),
                idle=lambda: None,
            ),
        )
        with st.expander("Words used here", icon=":material/menu_book:", key="lab_words"):
            for word in lesson.words:
                st.markdown(f"**{word}**: {GLOSSARY[word]}")
    with right:
        last_failure(state.job, key="lab")
        _result(state, request)
    device = {"device": request.device} if request.device != "cpu" else {}
    address.show({"experiment": request.name, **request.switches, **device})


def _first() -> LabState:
    """The choices of the address bar."""
    query = st.query_params.to_dict()
    query.pop("job", None)
    state = LabState(in_gallery="experiment" not in query)
    with page_job.refusing(state.job):
        lesson = lesson_called(query.pop("experiment", state.name))
        state.device = "cuda" if query.pop("device", "cpu") == "cuda" else "cpu"
        state.switches[lesson.name] = settings(lesson, query)
        state.name = lesson.name
    return state


def _gallery(state: LabState) -> None:
    """A card for each experiment: picture and answer of a recorded run, and the button that opens the experiment."""
    pictures = recorded_pictures()
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("Picture and answer of each card are of a recorded run. An experiment that is opened runs here.")
        _guided_path()
    for theme in dict.fromkeys(lesson.theme for lesson in lessons()):
        st.markdown(f"**{theme}**")
        with st.container(horizontal=True, gap="small"):
            for lesson in (lesson for lesson in lessons() if lesson.theme == theme):
                with st.container(border=True, width=CARD_WIDTH, gap="xsmall", key=f"lab_card_{lesson.name}"):
                    _card(state, lesson, pictures.get(lesson.name))


def _card(state: LabState, lesson: Lesson, picture: LessonPicture | None) -> None:
    """Title, question, picture and answer of an experiment; a lesson of one's own has no recorded run."""
    opened = partial(_open, state, lesson.name)
    st.button(f"**{lesson.title}**", key=f"lab_open_{lesson.name}", type="tertiary", on_click=opened)
    st.caption(escape(lesson.question))
    if picture is None:
        return
    st.image(sketch(picture.chart), width="stretch", alt=f"Shape of the answer to: {picture.chart.title}")
    small_text(escape(picture.answer))


def _guided_path() -> None:
    def pressed() -> None:
        tour.begin()
        go_to("explore")

    icon = ":material/school:"
    st.button("Guided path", key="tour_again", type="tertiary", icon=icon, help=OFFER, on_click=once_a_press(pressed))


def _open(state: LabState, name: str) -> None:
    state.name, state.in_gallery, state.visited = name, False, False


def _choice(state: LabState) -> Lesson:
    """Which experiment, and its story."""
    titles = {lesson.name: f"{lesson.theme}: {lesson.title}" for lesson in lessons()}
    names = list(titles)
    field = bound("lab_experiment", state.name, partial(setattr, state, "name"))
    select("Experiment", names, field, format_func=titles.__getitem__)
    lesson = lesson_called(state.name)
    st.markdown(f"#### {lesson.title}")
    st.markdown(f"**{lesson.question}**")
    for paragraph in lesson.paragraphs:
        st.markdown(escape(paragraph))
    return lesson


def _switches(state: LabState, lesson: Lesson) -> RunLab:
    """The request for a run with the current switches."""
    chosen = settings(lesson, state.switches.get(lesson.name, {}))
    for switch in lesson.switches:
        chosen[switch.name] = str(
            st.radio(
                switch.question, switch.values, index=switch.values.index(chosen[switch.name]),
                format_func=switch.label, horizontal=all(len(choice.label) <= 6 for choice in switch.choices),
                key=f"lab_{lesson.name}_{switch.name}",
            )
        )  # fmt: skip
    state.switches[lesson.name] = chosen
    offered = backend.devices(state.device)
    state.device = st.radio(
        "Where does it run?",
        offered,
        index=offered.index(state.device),
        horizontal=True,
        key="lab_device",
        help="cuda needs an NVIDIA GPU; every experiment runs on either.",
    )
    return RunLab(name=lesson.name, switches=chosen, device=state.device)


def _take(state: LabState, job: Job) -> None:
    """The result of a finished job."""
    assert isinstance(job.request, RunLab) and isinstance(job.result, LabOutcome), "no other job is attached here"
    key = request_key(job.request)
    runs().of("lab outcome").add(key, job.result)
    state.shown[job.request.name] = key


def _result(state: LabState, request: RunLab) -> None:
    """Draws the outcome; an outcome of an older run has a mark."""
    outcome = _outcome(request)
    fresh = outcome is not None
    if outcome is None:
        outcome = runs().of("lab outcome").get(state.shown.get(request.name, ""))
    if outcome is None:
        idle = "This experiment has not run yet. Press **Run**; it takes seconds."
        with st.container(border=True):
            st.caption(idle if state.job.id is None else "The experiment is running; what it finds will stand here.")
        return
    if not fresh:
        st.markdown(
            ":orange-badge[:material/history: for other switches] Switches were changed since. Press **Run** to see."
        )
    with st.container(border=True, key="lab_findings"):
        st.markdown("**What to take away**")
        st.markdown("\n".join(f"- {escape(finding)}" for finding in outcome.findings))
    chart = lab_chart(outcome)
    picture(chart, key="lab_chart")
    columns = {
        name: st.column_config.TextColumn(name, help=ORIGINS.get(origin, origin))
        for name, origin in lab_origins(outcome).items()
    }
    frame(list(chart.rows()), key="lab_table", alt=f"Table of {outcome.chart.title}", columns=columns)
    if outcome.printed:
        with st.expander("The wrapped model, printed", icon=":material/code:", expanded=True, key="lab_printed"):
            st.code(outcome.printed, language=None)
    st.caption(f"A real run of {outcome.seconds:.2g} s on {outcome.device}, every figure computed in it.")


def _outcome(request: RunLab) -> LabOutcome | None:
    outcome: LabOutcome | None = runs().of("lab outcome").get(request_key(request))
    return outcome
