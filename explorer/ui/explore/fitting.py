"""A view of the Budget tab: what would make the step fit. A press plays and judges every lever in the worker.

`front.py` is the view of policies. A lever may change the model or the loop, so this view draws no policy.
"""

from __future__ import annotations

import streamlit as st

from explorer.jobs.protocol import FindFit
from explorer.plan import lever_text, levers
from explorer.record.fit import Fit
from explorer.record.plan import Wish
from explorer.ui.explore import work
from explorer.ui.explore.work import ExploreState
from explorer.ui.session import page_job
from explorer.ui.shared.elements import frame, horizontal, small_text
from explorer.view.text.explore import STALE

VIEW = "What would make it fit"
INTRO = (
    "Each lever is played as a step without data: the optimizer's form, half the batch, bfloat16, the loss in chunks, "
    "LoRA, recompute. Gradients are judged by two real steps on this machine. The limit is the typed budget, the card, "
    "or this machine."
)
TIME = f"The typed budget limits time, and no lever is timed. {levers.BUDGETS}"
RECORDED = (
    "The levers change the model, and the model of a recorded step is in its script. `run.fit()` there, or "
    "`checkpoint-explorer fit` with the run's file, says which policies make it fit."
)


def fit_panel(state: ExploreState) -> None:
    """Draws the button that asks for levers, and the last answer: a table, and the lines of one of its rows."""
    spec, wish = work.baseline_spec(state), state.budget.wish
    if spec.model.is_recorded:
        st.caption(RECORDED)
        return
    wish = wish or Wish()
    budget_bytes, limits_time = wish.budget_bytes, wish.more_time is not None
    st.caption(INTRO)
    if limits_time:
        st.caption(TIME)
    with horizontal("fit_row"):
        st.button(
            "Play levers", icon=":material/tune:", key="find_fit",
            disabled=limits_time or state.job.id is not None,
            help="Takes from seconds to a minute. Progress and Cancel are at the bottom.",
            on_click=page_job.start, args=(state.job, FindFit(spec=spec, budget=budget_bytes)),
        )  # fmt: skip
        bitwise = st.toggle("Bitwise only", key="fit_bitwise", help="Hides levers that change gradients by any bit.")
    fit: Fit | None = work.result(state, "fit")
    if fit is None:
        return
    if (fit.as_is.spec, fit.budget_bytes) != (spec, budget_bytes):
        small_text(STALE)
    st.text(f"As it is: {lever_text.as_is_text(fit)}")
    _rows(levers.bitwise_only(fit) if bitwise else fit, is_under_way=state.job.id is not None)
    if fit.missing and state.job.id is None:
        small_text(fit.missing)
    for row in fit.left_out:
        small_text(f"Left out: {row.lever}. {row.reason}")


def _rows(fit: Fit, *, is_under_way: bool) -> None:
    rows = {lever_text.title(row): row for row in (*fit.rows, *fit.combinations)}
    if not rows:
        st.caption("Levers appear here as they are played." if is_under_way else "No lever is left to show.")
        return
    frame([lever_text.row_cells(row, fit.as_is) for row in rows.values()], key="fit_rows", alt=VIEW)
    chosen = rows[st.selectbox("How to switch it on", list(rows), key="fit_lever") or next(iter(rows))]
    st.code("\n".join(lever_text.script_lines(chosen)), language="python", wrap_lines=True)
    if chosen.judgement.reason:
        st.text(chosen.judgement.reason)
    if fit.judged_on is not None or not fit.missing:
        small_text(f"Judged on {lever_text.judged_text(fit)}")
