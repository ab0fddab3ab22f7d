"""Every run that was finished: open, compare, rename, pin, delete, and carry from one machine to another."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs.store import StoredRun
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.ui.session import backend, known, opened, pins
from explorer.ui.session.opened import PAGES
from explorer.ui.session.plain import plain
from explorer.ui.shared.charts import draw
from explorer.ui.shared.readable import on_primary
from explorer.ui.shared.reports import report_bytes
from explorer.view.drawing.units import count, mib
from explorer.view.memory.timeline import timeline
from explorer.view.words.cut_short import stored_peak
from explorer.view.words.runs import figures_of, stored_flops, stored_time

MOST_ROWS, HEIGHT = 12, 380
"""More rows than these scroll, within so many pixels."""
PINNABLE = ("measurement", "comparison")
"""Kinds whose policy can be the baseline of new runs."""


def page() -> None:
    """The list, and what can be done with what is selected in it."""
    st.markdown("#### Runs", help="Kept in one file in your data directory; CHECKPOINT_EXPLORER_HOME names another.")
    for kind in ("error", "done"):
        if message := st.session_state.pop(f"runs_{kind}", None):
            (st.error if kind == "error" else st.success)(plain(message))
    try:
        runs = backend.store().list()
    except ExplorerError as error:
        st.error(plain(str(error)))
        return
    _take_file()
    if not runs:
        st.caption("No run yet. Press **Run** on the Explore page, or open a run file from another machine.")
        return
    selected = _table(runs)
    if not selected:
        st.caption("Select a row to open, rename, pin, export or delete it; select two to see both timelines.")
    elif len(selected) == 1:
        _one(selected[0])
    else:
        _two(selected[0], selected[1])


def _take_file() -> None:
    """Opens a run file; a corrupt or foreign one is one sentence."""
    with st.expander("Open a run file", icon=":material/upload_file:", key="import_run"):
        given = st.file_uploader("Run file", type=["run", "explorer"], key="upload_run", label_visibility="collapsed")
    if given is None or st.session_state.get("taken_run") == given.file_id:
        return
    st.session_state["taken_run"] = given.file_id
    _do(lambda: backend.store().import_file(given.getvalue()), f"{given.name} was added.")


def _table(runs: tuple[StoredRun, ...]) -> list[StoredRun]:
    event = st.dataframe(
        [_row(run) for run in runs],
        key=_table_key(),
        hide_index=True,
        width="stretch",
        height="content" if len(runs) < MOST_ROWS else HEIGHT,
        on_select="rerun",
        selection_mode="multi-row",
        alt="Every finished run",
        column_config={
            "pinned": st.column_config.CheckboxColumn("baseline", help="Pinned as the baseline of new runs"),
            "finished": st.column_config.DatetimeColumn("finished", format="YYYY-MM-DD HH:mm"),
        },
    )
    rows: list[int] = event["selection"]["rows"]
    return [runs[row] for row in rows if row < len(runs)]


def _table_key() -> str:
    """Changes when the order of the rows does: a selected row must not become another run."""
    return f"runs_{st.session_state.get('runs_order', 0)}"


def _row(run: StoredRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "kind": run.kind,
        "model": run.model,
        "step peak": _peak(run),
        "FLOPs": stored_flops(run.headlines),
        "step time": stored_time(run.headlines),
        "gradients": _gradients(run),
        "pinned": run.pinned,
        "finished": datetime.fromtimestamp(run.created),
    }


def _peak(run: StoredRun) -> str:
    """The step's peak, a pipeline run's on its highest rank; empty for kinds of run that have none."""
    headlines = run.headlines
    if ranks := headlines.get("rank_peak_bytes"):
        return f"{mib(max(ranks))} on rank {ranks.index(max(ranks))}"
    if run.kind not in PINNABLE:
        return ""
    base, peak = headlines.get("baseline"), stored_peak(headlines.get("candidate") or headlines)
    if not base:
        return peak
    if n_blocks := headlines.get("n_baseline_recompute"):
        return f"{stored_peak(base)} ({count(n_blocks, 'block')} recomputed) → {peak}"
    return f"{stored_peak(base)} → {peak}" if headlines.get("comparable", True) else f"{stored_peak(base)}; {peak}"


def _gradients(run: StoredRun) -> str:
    headlines = run.headlines
    if "n_splitting_equal" not in headlines:
        return str(headlines.get("verdict", ""))
    return f"{headlines['n_splitting_equal']} of {headlines['n_gradients']} equal" if headlines["n_gradients"] else ""


def _one(run: StoredRun) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="actions"):
        name = st.text_input("Name", run.name, key=f"name_{run.run_id}", max_chars=200)
        if st.button("Rename", icon=":material/edit:", key="rename", disabled=name == run.name or not name.strip()):
            _do(lambda: backend.store().rename(run.run_id, name.strip()), "Renamed.", reorders=False)
        if st.button(
            on_primary("Open", disabled=run.kind not in PAGES),
            icon=":material/open_in_new:",
            key="open",
            type="primary",
            disabled=run.kind not in PAGES,
            help=f"On the {PAGES.get(run.kind, 'explore').capitalize()} page, as it was; nothing is measured again.",
        ):
            _open(run)
        word = "Unpin" if run.pinned else "Pin as baseline"
        pin_help = "New runs of this model are compared with this policy instead of with everything kept."
        if st.button(word, icon=":material/push_pin:", key="pin", disabled=run.kind not in PINNABLE, help=pin_help):
            _pin(run)
        st.download_button(
            "Export", data=lambda: backend.store().export_file(run.run_id), file_name=f"{run.run_id}.run",
            mime="application/octet-stream", key="export", icon=":material/download:", on_click="ignore",
        )  # fmt: skip
        if run.kind in PINNABLE:
            st.download_button(
                "Report", data=lambda: report_bytes(run.run_id), file_name=f"{run.run_id}.html", mime="text/html",
                key="report", icon=":material/article:", on_click="ignore",
                help="One HTML file for somebody else: no server, no network.",
            )  # fmt: skip
        if st.button("Delete", icon=":material/delete:", key="delete"):
            _confirm(run)


def _two(one: StoredRun, other: StoredRun) -> None:
    """Both timelines on one axis; a comparison stands there with its candidate."""
    try:
        first, second = _candidate(backend.record(one.run_id)), _candidate(backend.record(other.run_id))
    except ExplorerError as error:
        st.error(plain(str(error)))
        return
    if first is None or second is None:
        st.caption("Only measurements and comparisons have a timeline.")
        return
    st.text(f"baseline: {one.name}\ncandidate: {other.name}")
    draw(timeline(first, second), key="two_runs")
    figures, others = figures_of(first), figures_of(second)
    st.dataframe(
        [{"figure": name, one.name: figures[name], f"{other.name} ": others[name]} for name in figures],
        key="two_figures", hide_index=True, width="stretch", alt="Headline figures of both runs",
    )  # fmt: skip


def _candidate(record: Any) -> Measurement | None:
    if isinstance(record, Comparison):
        return record.candidate
    return record if isinstance(record, Measurement) else None


def _open(run: StoredRun) -> None:
    """Puts model, policy, options and figures of the run on the page that shows its kind."""
    try:
        page_name = opened.hand_over(run)
    except ExplorerError as error:
        st.session_state["runs_error"] = str(error)
        st.rerun()
    st.switch_page(st.session_state["pages"][page_name])


def _pin(run: StoredRun) -> None:
    def act() -> None:
        backend.store().pin(run.run_id, pinned=not run.pinned)
        pins.read()

    _do(act, "Unpinned." if run.pinned else "Pinned: new runs of this model are compared with this policy.")


@st.dialog("Delete this run?")
def _confirm(run: StoredRun) -> None:
    st.text(run.name)
    st.caption("It cannot be brought back. Export it first to keep a copy.")
    if st.button(on_primary("Delete for good"), type="primary", icon=":material/delete:", key="delete_for_good"):
        _do(lambda: _delete(run), "Deleted.")


def _delete(run: StoredRun) -> None:
    backend.store().delete(run.run_id)
    known.forget(run.run_id)


def _do(act: Callable[[], object], done: str, *, reorders: bool = True) -> None:
    """Does it, says so on the next run of the page, and starts that."""
    try:
        act()
        st.session_state["runs_done"] = done
        if reorders:
            st.session_state["runs_order"] = st.session_state.get("runs_order", 0) + 1
    except ExplorerError as error:
        st.session_state["runs_error"] = str(error)
    st.rerun()
