"""Planners side by side on the drawn model: who takes part, under which budgets, and what real steps said."""

from __future__ import annotations

import msgspec
import streamlit as st

from explorer.jobs.protocol import RunArena
from explorer.plan.arena.table import rivals
from explorer.record.arena import ARENA_REPEATS, Arena
from explorer.record.run import RunSpec
from explorer.ui.session.plain import plain
from explorer.ui.shared.charts import draw
from explorer.ui.shared.fold import fold
from explorer.ui.shared.reports import report_button
from explorer.view.compare.arena import arena_chart, at_budget, beaten_sentence, outcome_in_words, title_of
from explorer.view.drawing.units import percent_whole
from explorer.view.words import explore as glossary

SHARES = (0.3, 0.5, 0.7, 0.9)
USUAL = (0.5, 0.7)


def arena_panel(spec: RunSpec, arena: Arena | None, key: str | None, *, busy: bool) -> RunArena | None:
    """The last arena, stored under `key`, and what to ask of the next one. Returns the request of the button."""
    st.caption(glossary.ARENA)
    known = rivals()
    names = st.multiselect(
        "Planners",
        list(known),
        default=[name for name, rival in known.items() if rival.choose is not None],
        format_func=title_of,
        key="arena_rivals",
        help=glossary.ARENA_RIVALS,
    )
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        shares = st.pills(
            "Budgets, of the peak with everything kept",
            SHARES,
            selection_mode="multi",
            default=USUAL,
            format_func=percent_whole,
            key="arena_budgets",
        )
        pressed = st.button(
            "Run the arena",
            icon=":material/stadium:",
            key="arena_run",
            disabled=busy or not names or not shares,
            help="Each choice runs in a process of its own, for its peak and its gradients; then all take "
            f"{ARENA_REPEATS} timed steps or more in turns in one process. A few minutes in all; Cancel works.",
        )
    if arena is not None:
        _results(arena, spec)
        if key is not None:
            report_button(key, stem="arena", widget="arena_report")
    often = msgspec.structs.replace(spec, n_repeats=max(spec.n_repeats, ARENA_REPEATS))
    return RunArena(spec=often, shares=tuple(shares), only=tuple(names)) if pressed else None


def _results(arena: Arena, spec: RunSpec) -> None:
    if arena.spec.model != spec.model:
        st.caption(plain(f"Of {arena.spec.model.target}."))
    st.markdown(plain(beaten_sentence(arena)))
    draw(arena_chart(arena), key="arena_chart")
    remarks: dict[str, None] = {}
    for bout in arena.bouts:
        if sentence := outcome_in_words(bout):
            remarks[f"{title_of(bout.rival)}{at_budget(bout)}: {sentence}"] = None
    if remarks:
        with fold("Who could not run, missed the budget or moved a gradient", key="arena_said", expanded=True):
            for line in remarks:
                st.text(line)
