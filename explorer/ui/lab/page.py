"""The lab: read a story, flip its switches, run it for real, see what there is to take away.

    experiment, story, switches, Run   |   take-aways, chart, table

A run starts by its button; only the first visit runs the experiment it opens with, so that nothing is empty.
"""

from __future__ import annotations

import re
from typing import Any

import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs.client import Job
from explorer.jobs.protocol import RunLab
from explorer.plan.lessons import lesson_called, lessons, settings
from explorer.record.base import from_plain, to_json, to_plain
from explorer.record.failure import Failure
from explorer.record.lab import LabOutcome, Lesson, Switch
from explorer.ui.explore.run_bar import RUN_WIDTH
from explorer.ui.session import backend
from explorer.ui.shared.charts import picture
from explorer.ui.shared.failure import failure_panel
from explorer.ui.shared.progress import watch
from explorer.view.drawing.chart import Chart
from explorer.view.lab import lab_chart, lab_origins
from explorer.view.words.lab import GLOSSARY

State = dict[str, Any]
ORIGINS = {
    "counted": "Counted exactly: operations, calls, tensors.",
    "measured": "Read off this run: values of tensors, or the allocator's own events.",
}


def page() -> None:
    """The whole page."""
    state = _state()
    _settle(state)
    left, right = st.columns([5, 7], gap="large")
    with left:
        lesson = _choice(state)
        request = _switches(state, lesson)
        _first_visit(state, request)
        _run_bar(state, request)
        _words(lesson)
    with right:
        if state["failure"] and failure_panel(from_plain(state["failure"], Failure), key="lab"):
            state["failure"] = None
            st.rerun()
        _result(state, request)
    _to_address(state, request)


def _state() -> State:
    """This visitor's choices; on the first visit those of the address bar."""
    if "lab" not in st.session_state:
        query = st.query_params.to_dict()
        state: State = {
            "name": lessons()[0].name,
            "switches": {},
            "job": query.pop("job", None),
            "failure": None,
            "asked": False,
        }
        state |= {"shown": {}, "visited": False}
        try:
            lesson = lesson_called(query.pop("experiment", lessons()[0].name))
            state["device"] = query.pop("device", "cpu") if query.get("device") in ("cpu", "cuda") else "cpu"
            state["switches"][lesson.name] = settings(lesson, query)
            state["name"] = lesson.name
        except ExplorerError as error:
            state["device"] = "cpu"
            state["failure"] = to_plain(Failure(kind="bad input", sentence=error.sentence, hint=error.hint))
        st.session_state["lab"] = state
    found: State = st.session_state["lab"]
    return found


def _choice(state: State) -> Lesson:
    """Which experiment, and its story."""
    titles = {lesson.name: f"{lesson.theme}: {lesson.title}" for lesson in lessons()}
    names = list(titles)
    name = st.selectbox(
        "Experiment", names, index=names.index(state["name"]), format_func=titles.__getitem__, key="lab_experiment"
    )
    state["name"] = name
    lesson = lesson_called(name)
    st.markdown(f"#### {lesson.title}")
    st.markdown(f"**{lesson.question}**")
    for paragraph in lesson.paragraphs:
        st.markdown(_plain(paragraph))
    return lesson


def _switches(state: State, lesson: Lesson) -> RunLab:
    """The run as the switches stand."""
    chosen = settings(lesson, state["switches"].get(lesson.name, {}))
    for switch in lesson.switches:
        chosen[switch.name] = _flip(lesson, switch, chosen[switch.name])
    state["switches"][lesson.name] = chosen
    state["device"] = st.radio(
        "Where does it run?",
        ["cpu", "cuda"],
        index=["cpu", "cuda"].index(state["device"]),
        horizontal=True,
        key="lab_device",
        help="cuda needs an NVIDIA GPU; every experiment runs on either.",
    )
    return RunLab(name=lesson.name, switches=chosen, device=state["device"])


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


def _first_visit(state: State, request: RunLab) -> None:
    if not state["visited"]:
        state["visited"] = True
        if state["job"] is None and state["failure"] is None and _found(request) is None:
            _start(state, request)


def _start(state: State, request: RunLab) -> None:
    state["failure"] = None
    try:
        state["job"] = backend.worker().submit(request).id
    except ExplorerError as error:
        state["failure"] = to_plain(Failure(kind="bad input", sentence=error.sentence, hint=error.hint))


def _job(state: State) -> Job | None:
    return None if state["job"] is None else backend.worker().job(state["job"])


def _settle(state: State) -> bool:
    """Takes the result of a job that has finished, or that nobody knows any more. Returns whether there was one."""
    job = _job(state)
    if state["job"] is None or (job is not None and not job.finished):
        return False
    state["job"] = None
    if job is None or not isinstance(job.request, RunLab):
        return True
    if job.failure is not None:
        state["failure"] = to_plain(job.failure)
        return True
    key = _key(job.request)
    backend.records().keep(key, job.result)
    state["shown"][job.request.name] = key
    return True


def _run_bar(state: State, request: RunLab) -> None:
    """Run, and below it how far it is and Cancel."""
    busy = state["job"] is not None
    if st.button(
        "Run",
        key="lab_run",
        type="primary",
        icon=":material/play_arrow:",
        width=RUN_WIDTH,
        disabled=busy,
        help="Runs the experiment now, with the switches as they stand. It takes seconds.",
    ):
        _start(state, request)
        st.rerun()
    if busy:
        watch(lambda: None if _settle(state) else _job(state), "Running", key="lab_cancel")


def _words(lesson: Lesson) -> None:
    with st.expander("Words used here", icon=":material/menu_book:", key="lab_words"):
        for word in lesson.words:
            st.markdown(f"**{word}**: {GLOSSARY[word]}")


def _result(state: State, request: RunLab) -> None:
    """What the run said; an older run of the experiment is marked as such."""
    outcome, fresh = _found(request), True
    if outcome is None:
        last = state["shown"].get(request.name)
        outcome, fresh = (backend.records().get(last) if last else None), False
    if not isinstance(outcome, LabOutcome):
        with st.container(border=True):
            if state["job"] is not None:
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
        st.markdown("\n".join(f"- {_plain(finding)}" for finding in outcome.findings))
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


def _found(request: RunLab) -> LabOutcome | None:
    found = backend.records().get(_key(request))
    return found if isinstance(found, LabOutcome) else None


def _key(request: RunLab) -> str:
    return f"lab {to_json(request).decode()}"


def _to_address(state: State, request: RunLab) -> None:
    """The address restores experiment, switches and a run under way."""
    query = {"experiment": request.name, **request.switches}
    query |= {"device": request.device} if request.device != "cpu" else {}
    query |= {"job": state["job"]} if state["job"] else {}
    if st.query_params.to_dict() != query:
        st.query_params.from_dict(query)


def _plain(text: str) -> str:
    """Text that carries no markup, whatever an exception or a lesson says."""
    return re.sub(r"([\\`*_\[\]$~:#<>])", r"\\\1", text)
