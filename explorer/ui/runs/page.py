"""The Runs page: open, compare, rename, note, delete finished runs, and move them between machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs import run_file
from explorer.jobs.run_file import grouped
from explorer.jobs.store import StoredRun
from explorer.plan.card.opened import SUFFIXES, is_history, open_history
from explorer.plan.card.snapshot import LARGEST_BYTES
from explorer.record.comparison import Comparison
from explorer.record.history import MemoryHistory
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.ui.runs.table import HISTORY, PIPELINE, RANKS, RunsState, chosen_runs, current, points_of, reorder, table
from explorer.ui.session import backend, repository
from explorer.ui.session.repository import PAGES
from explorer.ui.session.values import whole
from explorer.ui.shared.charts import draw
from explorer.ui.shared.download import Offer, download, report_button, trace_buttons
from explorer.ui.shared.elements import escape, frame, horizontal, on_primary, small_text
from explorer.view.compare.front import SIGNS, TOO_FEW, run_plane
from explorer.view.drawing.units import count
from explorer.view.memory.ranks import rank_rows, ranks_at_peak, ranks_over_time
from explorer.view.memory.timeline import alone, timeline
from explorer.view.text.runs import alive_rows, figures_of, history_notes, history_rows, refusal_rows

LONGEST_NOTE = 2000


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
        actions_on(selected[0])
    else:
        compare_runs(selected)
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

    do(add, "")


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


def actions_on(run: StoredRun) -> None:
    """Draws the actions on a single run."""
    with horizontal("actions", align="bottom"):
        name = st.text_input("Name", run.name, key=f"name_{run.run_id}", max_chars=200)
        if st.button("Rename", icon=":material/edit:", key="rename", disabled=name == run.name or not name.strip()):
            do(lambda: backend.store().rename(run.run_id, name.strip()), "Renamed.", reorders=False)
        if run.kind != HISTORY and st.button(
            on_primary("Open", disabled=run.kind not in PAGES),
            icon=":material/open_in_new:",
            key="open",
            type="primary",
            disabled=run.kind not in PAGES,
            help=f"On the {PAGES.get(run.kind, 'explore').capitalize()} page, as it was; nothing is measured again.",
        ):
            _open(run)
        download(Offer("Export", f"{run.run_id}.run", lambda: backend.store().export_file(run.run_id)), key="export")
        report_button(run.run_id, stem=run.run_id, widget="report", label="Report")
        if run.kind != PIPELINE:
            with st.popover("Other programs", icon=":material/ios_share:", key="other_programs"):
                trace_buttons(run.run_id, stem=run.run_id, widget="trace")
        if st.button("Delete", icon=":material/delete:", key="delete"):
            _confirm([run])
    _note(run)
    if run.kind == HISTORY:
        _history(run)
    if run.kind == RANKS and (rank := _ranks(run)) is not None:
        _open(rank)


def _note(run: StoredRun) -> None:
    """Words beside the run; they stay in this list."""
    with horizontal("note_row", align="bottom"):
        note = st.text_input(
            "Note", run.note, key=f"note_{run.run_id}", max_chars=LONGEST_NOTE,
            help="Why this run was made, what it showed. Shown in the list; a run file does not contain it.",
        )  # fmt: skip
        if st.button("Save note", icon=":material/edit_note:", key="save_note", disabled=note.strip() == run.note):
            do(lambda: backend.store().write_note(run.run_id, note.strip()), "Noted.", reorders=False)


def compare_runs(runs: Sequence[StoredRun]) -> None:
    """Runs side by side in figures, two also as timelines on one axis; a comparison takes part with its candidate."""
    if st.button(f"Delete {count(len(runs), 'run')}", icon=":material/delete:", key="delete_several"):
        _confirm(runs)
    try:
        candidates = [_candidate(repository.runs().record(run.run_id)) for run in runs]
    except ExplorerError as error:
        st.error(escape(str(error)))
        return
    measured = [run for run in candidates if run is not None]
    if len(measured) < len(runs):
        st.caption("Only measurements, comparisons and recorded ranks can be held side by side.")
        return
    if len(runs) == 2:
        st.text(f"baseline: {runs[0].name}\ncandidate: {runs[1].name}")
        draw(timeline(*measured), key="two_runs")
    figures = [figures_of(run) for run in measured]
    several = [run.name for run in runs]
    names = [name if several.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(several, 1)]
    rows = [{"figure": name, **{run: of_run[name] for run, of_run in zip(names, figures)}} for name in figures[0]]
    frame(rows, key="side_by_side", alt="Headline figures of the selected runs")


def _candidate(record: object) -> Measurement | None:
    if isinstance(record, Comparison):
        return record.candidate
    if isinstance(record, RecordedRanks):
        return record.fullest
    return record if isinstance(record, Measurement) else None


def _open(run: StoredRun) -> None:
    """Puts model, policy, options and figures of the run on the page that shows its kind."""
    try:
        page_name = repository.open_on_page(run)
    except ExplorerError as error:
        current().error = str(error)
        st.rerun()
    st.switch_page(st.session_state["pages"][page_name])


@st.dialog("Delete for good?")
def _confirm(runs: Sequence[StoredRun]) -> None:
    st.text("\n".join(run.name for run in runs))
    st.caption(f"{'It' if len(runs) == 1 else 'They'} cannot be brought back. Export first to keep a copy.")
    if st.button(on_primary("Delete for good"), type="primary", icon=":material/delete:", key="delete_for_good"):

        def delete() -> None:
            for run in runs:
                backend.store().delete(run.run_id)
                repository.runs().drop(run.run_id)

        do(delete, "Deleted.")


def do(act: Callable[[], object], outcome: str, *, reorders: bool = True) -> None:
    """Calls `act` and draws the page again, which shows `outcome`, or the sentence that `act` returns."""
    try:
        with whole():  # no selected row may become another run
            sentence = act()
            current().outcome = sentence if isinstance(sentence, str) else outcome
            if reorders:
                reorder()
    except ExplorerError as error:
        current().error = str(error)
    st.rerun()


def _ranks(run: StoredRun) -> StoredRun | None:
    """The ranks of one recorded step side by side. Returns the rank that a person opens, as a run of the list."""
    try:
        ranks = repository.runs().record(run.run_id)
        assert isinstance(ranks, RecordedRanks), "of that kind"
        chosen = None
        with horizontal("one_rank", align="bottom"):
            numbers = list(ranks.by_rank)
            fullest = numbers.index(ranks.fullest.rank or 0)
            rank = st.selectbox("Rank", numbers, index=fullest, key=f"rank_{run.run_id}", width=120)
            if st.button(
                on_primary("Open this rank"), icon=":material/open_in_new:", key="open_rank", type="primary",
                help="On the Explore page, as a run of its own: forecast and planned like any other.",
            ):  # fmt: skip
                chosen = _stored_rank(f"{run.name}, rank {rank}", ranks.by_rank[rank])
    except ExplorerError as error:
        st.error(escape(str(error)))
        return None
    draw(ranks_over_time(ranks), key="ranks_over_time")
    draw(ranks_at_peak(ranks), key="ranks_at_peak")
    frame(rank_rows(ranks), key="ranks", alt="One row a rank")
    return chosen


def _history(run: StoredRun) -> None:
    """Each device of a recorded memory history: timeline, peaks under several options, what is alive at the peak."""
    try:
        history = repository.runs().record(run.run_id)
        assert isinstance(history, MemoryHistory), "of that kind"
    except ExplorerError as error:
        st.error(escape(str(error)))
        return
    for number, (device, of_device) in enumerate(zip(history.devices, history.runs)):
        st.markdown(f"##### {escape(device.label)}")
        draw(alone(timeline(of_device)), key=f"history_{number}")
        tables = {
            "Peaks, as recorded and under other settings of the allocator": history_rows(device),
            "Refused requests": refusal_rows(device),
            "Alive at the peak, by module": alive_rows(of_device, "module"),
            "Alive at the peak, by source line": alive_rows(of_device, "source line"),
        }
        for title, rows in tables.items():
            if rows:
                st.caption(title)
                frame(rows, key=f"{title} {number}", alt=title)
        for note in history_notes(device):
            small_text(escape(note))


def _stored_rank(name: str, rank: Measurement) -> StoredRun:
    """Adds the rank to the list the first time."""
    store, model = backend.store(), rank.spec.model.target
    stored = next((run for run in store.list() if (run.name, run.model) == (name, model)), None)
    run_id = stored.run_id if stored is not None else store.save(rank, name)
    return next(run for run in store.list() if run.run_id == run_id)
