"""The Lab page: read a story, flip its switches, run the experiment, see the findings.

    experiment, story, switches, Run   |   take-aways, chart, table

A button starts a run. On the first visit the open experiment runs without a press, so that no panel is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import streamlit as st

from explorer.jobs.client import Job
from explorer.jobs.protocol import RunLab
from explorer.plan.lessons import lesson_called, lessons, settings
from explorer.record.lab import LabOutcome, Lesson, Switch
from explorer.record.run import Device
from explorer.ui.session import address, backend, page_job
from explorer.ui.session.page_job import PageJob
from explorer.ui.session.repository import request_key, runs
from explorer.ui.session.values import session_value
from explorer.ui.shared import tour
from explorer.ui.shared.charts import picture
from explorer.ui.shared.elements import escape, last_failure
from explorer.ui.shared.run_bar import RunBar, run_bar
from explorer.view.drawing.figure import Chart
from explorer.view.lab import lab_chart, lab_origins
from explorer.view.text.lab import GLOSSARY, OFFER

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
    visited: bool = False
    """Whether the experiment of the first visit was run."""
    job: PageJob = field(default_factory=PageJob)


def page() -> None:
    """The whole page."""
    state = session_value("lab", LabState, _first)
    page_job.attach(state.job, (RunLab,))
    page_job.settle(state.job, partial(_take, state))
    left, right = st.columns([5, 7], gap="large")
    with left:
        if st.button("Guided path", key="tour_again", type="tertiary", icon=":material/school:", help=OFFER):
            tour.begin()
            st.switch_page(st.session_state["pages"]["explore"])
        lesson = _choice(state)
        request = _switches(state, lesson)
        _first_visit(state, request)
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
        _words(lesson)
    with right:
        last_failure(state.job, key="lab")
        _result(state, request)
    _to_address(request)


def _first() -> LabState:
    """The choices of the address bar."""
    query = st.query_params.to_dict()
    query.pop("job", None)
    state = LabState()
    with page_job.refusing(state.job):
        lesson = lesson_called(query.pop("experiment", state.name))
        state.device = "cuda" if query.pop("device", "cpu") == "cuda" else "cpu"
        state.switches[lesson.name] = settings(lesson, query)
        state.name = lesson.name
    return state


def _choice(state: LabState) -> Lesson:
    """Which experiment, and its story."""
    titles = {lesson.name: f"{lesson.theme}: {lesson.title}" for lesson in lessons()}
    names = list(titles)
    name = st.selectbox(
        "Experiment", names, index=names.index(state.name), format_func=titles.__getitem__, key="lab_experiment"
    )
    state.name = name
    lesson = lesson_called(name)
    st.markdown(f"#### {lesson.title}")
    st.markdown(f"**{lesson.question}**")
    for paragraph in lesson.paragraphs:
        st.markdown(escape(paragraph))
    return lesson


def _switches(state: LabState, lesson: Lesson) -> RunLab:
    """The request for a run with the current switches."""
    chosen = settings(lesson, state.switches.get(lesson.name, {}))
    for switch in lesson.switches:
        chosen[switch.name] = _flip(lesson, switch, chosen[switch.name])
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


def _flip(lesson: Lesson, switch: Switch, value: str) -> str:
    short = all(len(choice.label) <= 6 for choice in switch.choices)
    picked = st.radio(
        switch.question,
        switch.values,
        index=switch.values.index(value),
        format_func=switch.label,
        horizontal=short,
        key=f"lab_{lesson.name}_{switch.name}",
    )
    return str(picked)


def _first_visit(state: LabState, request: RunLab) -> None:
    if not state.visited:
        state.visited = True
        if state.job.failure is None and _outcome(request) is None:
            page_job.start(state.job, request)


def _take(state: LabState, job: Job) -> None:
    """The result of a finished job."""
    assert isinstance(job.request, RunLab) and isinstance(job.result, LabOutcome), "no other job is attached here"
    key = request_key(job.request)
    runs().lab_outcomes.add(key, job.result)
    state.shown[job.request.name] = key


def _words(lesson: Lesson) -> None:
    with st.expander("Words used here", icon=":material/menu_book:", key="lab_words"):
        for word in lesson.words:
            st.markdown(f"**{word}**: {GLOSSARY[word]}")


def _result(state: LabState, request: RunLab) -> None:
    """Draws the outcome; an outcome of an older run has a mark."""
    outcome = _outcome(request)
    fresh = outcome is not None
    if outcome is None:
        outcome = runs().lab_outcomes.get(state.shown.get(request.name, ""))
    if outcome is None:
        with st.container(border=True):
            if state.job.id is not None:
                st.caption("The experiment is running; what it finds will stand here.")
            else:
                st.caption("This experiment has not run yet. Press **Run**; it takes seconds.")
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
    _table(chart, outcome)
    if outcome.printed:
        with st.expander("The wrapped model, printed", icon=":material/code:", expanded=True, key="lab_printed"):
            st.code(outcome.printed, language=None)
    st.caption(f"A real run of {outcome.seconds:.2g} s on {outcome.device}, every figure computed in it.")


def _table(chart: Chart, outcome: LabOutcome) -> None:
    columns = {
        name: st.column_config.TextColumn(name, help=ORIGINS.get(origin, origin))
        for name, origin in lab_origins(outcome).items()
    }
    st.dataframe(
        list(chart.rows()),
        key="lab_table",
        column_config=columns,
        hide_index=True,
        width="stretch",
        alt=f"Table of {outcome.chart.title}",
    )


def _outcome(request: RunLab) -> LabOutcome | None:
    return runs().lab_outcomes.get(request_key(request))


def _to_address(request: RunLab) -> None:
    """The address restores experiment and switches."""
    device = {"device": request.device} if request.device != "cpu" else {}
    address.show({"experiment": request.name, **request.switches, **device})
