"""The ranks of one recorded step side by side; each rank opens as a separate run."""

from __future__ import annotations

import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs.store import StoredRun
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.ui.session import backend
from explorer.ui.session.plain import plain
from explorer.ui.shared.charts import draw
from explorer.ui.shared.readable import on_primary
from explorer.view.memory.ranks import rank_rows, ranks_at_peak, ranks_over_time


def ranks_panel(run: StoredRun) -> StoredRun | None:
    """Both charts and the table. Returns the rank that a person wants to open, as a run of the list."""
    try:
        of = backend.record(run.run_id)
        assert isinstance(of, RecordedRanks), "of that kind"
        wanted = None
        with st.container(horizontal=True, gap="small", vertical_alignment="bottom", key="one_rank"):
            ranks = list(of.by_rank)
            fullest = ranks.index(of.fullest.rank or 0)
            rank = st.selectbox("Rank", ranks, index=fullest, key=f"rank_{run.run_id}", width=120)
            if st.button(
                on_primary("Open this rank"), icon=":material/open_in_new:", key="open_rank", type="primary",
                help="On the Explore page, as a run of its own: forecast and planned like any other.",
            ):  # fmt: skip
                wanted = _listed(f"{run.name}, rank {rank}", of.by_rank[rank])
    except ExplorerError as error:
        st.error(plain(str(error)))
        return None
    draw(ranks_over_time(of), key="ranks_over_time")
    draw(ranks_at_peak(of), key="ranks_at_peak")
    st.dataframe(rank_rows(of), key="ranks", hide_index=True, width="stretch", alt="One row a rank")
    return wanted


def _listed(name: str, one: Measurement) -> StoredRun:
    """Kept in the list the first time."""
    store, model = backend.store(), one.spec.model.target
    known = next((run for run in store.list() if (run.name, run.model) == (name, model)), None)
    run_id = known.run_id if known is not None else store.save(one, name)
    return next(run for run in store.list() if run.run_id == run_id)
