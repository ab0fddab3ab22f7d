"""The Runs page: open, compare, rename, delete finished runs, and move them between machines."""

from __future__ import annotations

import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs import run_file
from explorer.jobs.run_file import grouped
from explorer.jobs.store import StoredRun
from explorer.plan.card.opened import SUFFIXES, is_history, open_history
from explorer.plan.card.snapshot import LARGEST_BYTES
from explorer.ui.runs import actions
from explorer.ui.runs.table import RunsState, chosen_runs, current, points_of, reorder, table
from explorer.ui.session import backend
from explorer.ui.shared.charts import draw
from explorer.ui.shared.elements import escape, small_text
from explorer.view.compare.run_plane import SIGNS, TOO_FEW, run_plane
from explorer.view.drawing.units import count


def page() -> None:
    """Draws the list, and the actions on the selected runs."""
    st.markdown("#### Runs", help="Kept in one file in your data directory; CHECKPOINT_EXPLORER_HOME names another.")
    _last_outcome(current())
    try:
        runs = backend.store().list()
    except ExplorerError as error:
        st.error(escape(str(error)))
        return
    _take_file()
    if not runs:
        st.caption("No run yet. Press **Run** on the Explore page, or open a run file from another machine.")
        return
    listed = chosen_runs(runs)
    selected = table(listed)
    if not selected:
        st.caption("Select a row to open, rename, note, export or delete it; select several to compare them.")
    elif len(selected) == 1:
        actions.actions_on(selected[0])
    else:
        actions.compare_runs(selected)
    _plane(listed, selected)


def _last_outcome(state: RunsState) -> None:
    """Shows the outcome of the last action, once."""
    if state.error:
        st.error(escape(state.error))
    if state.outcome:
        st.toast(escape(state.outcome), icon=":material/check:")  # over the page: no row moves
    state.error = state.outcome = ""


def _take_file() -> None:
    """Opens a run file or another program's memory history; a corrupt or foreign one is one sentence."""
    with st.expander(
        "Open a run file, a memory snapshot or a profiler trace", icon=":material/upload_file:", key="import_run"
    ):
        chosen = st.file_uploader(
            "Run file", type=["run", "explorer", *SUFFIXES], key="upload_run", label_visibility="collapsed",
            accept_multiple_files=True, max_upload_size=LARGEST_BYTES >> 20,
        )  # fmt: skip
        small_text(
            "Files of the ranks of one step, chosen together, become one run: ranks side by side. A snapshot is what "
            "`torch.cuda.memory._dump_snapshot` writes, a trace what `export_chrome_trace` writes after a profile with "
            "`profile_memory=True`. Neither can run code here."
        )
    files_taken = current().files_taken
    new = [file for file in chosen if file.file_id not in files_taken]
    if not new:
        return
    files_taken.update(file.file_id for file in new)

    names = ", ".join(file.name for file in new)

    def add() -> str:
        before = {run.run_id for run in backend.store().list()}
        data = {file.name: file.getvalue() for file in new}
        foreign = {name: content for name, content in data.items() if is_history(content[:64])}
        records = [run_file.stored_record(open_history(content, name), name) for name, content in foreign.items()]
        records += grouped([content for name, content in data.items() if name not in foreign])
        added = [backend.store().import_file(run_file.write(record)) for record in records]
        here = [run_id for run_id in added if run_id in before]
        if not here:
            return f"{names} {'was' if len(new) == 1 else 'were'} added."
        return f"{names}: {len(here)} of {count(len(added), 'run')} already here, with the same content."

    actions.do(add, "")


def _plane(runs: tuple[StoredRun, ...], selected: list[StoredRun]) -> None:
    """The runs of one model as points of peak and time: the newest model, of the selected runs if there are any, that
    has two points."""
    newest = sorted(selected or runs, key=lambda run: run.created, reverse=True)
    models = dict.fromkeys(run.model for run in newest)
    by_model = {model: points_of([run for run in runs if run.model == model]) for model in models}
    model, keyed = next(((model, keyed) for model, keyed in by_model.items() if len(keyed) > 1), ("", []))
    if not keyed:
        st.caption(TOO_FEW)
        return
    points = [point for _, point in keyed]
    st.caption(SIGNS)
    draw(run_plane(points, model), key="run_plane", act=lambda custom: reorder(keyed[int(custom[0])][0].run_id))
