"""Is it the same step? The verdict, the worst tensor, the likely cause, and what else the step left behind."""

from __future__ import annotations

from typing import Literal

import streamlit as st

from explorer.record.comparison import Comparison, Verdict
from explorer.ui.shared.charts import draw
from explorer.ui.shared.fold import fold
from explorer.view.compare.gradients import (
    buffer_table,
    carried_table,
    diff_table,
    gradient_chart,
    mask_table,
    parameter_table,
    recompute_count_table,
    rng_table,
    scope_sentence,
    state_change_table,
    verdict_sentence,
)
from explorer.view.text import explore as glossary

COLOURS: dict[Verdict, Literal["green", "orange", "violet", "red", "gray"]] = {
    "bitwise equal": "green",
    "rounding": "orange",
    "state moved": "violet",
    "different": "red",
    "not comparable": "gray",
}
ICONS = {
    "bitwise equal": ":material/check_circle:",
    "rounding": ":material/approval:",
    "state moved": ":material/sync_problem:",
    "different": ":material/cancel:",
    "not comparable": ":material/help:",
}


def gradients_panel(comparison: Comparison) -> None:
    """The verdict with its reasons, the tensors, then buffers, random generators, masks and state."""
    verdict = comparison.verdict
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.badge(verdict, icon=ICONS[verdict], color=COLOURS[verdict], help=glossary.GRADIENTS)
        # st.text: names come from the model and must not become markup.
        st.text(verdict_sentence(comparison))
    for cause in comparison.causes:
        st.text(f"Likely cause: {cause}")
    if scope := scope_sentence(comparison):
        st.text(scope)
    draw(gradient_chart(comparison), key="gradients")
    st.markdown("**What else the step left behind**")
    for key, title, rows in _rest(comparison):
        with fold(f"{title} ({len(rows)})", key=f"rest_{key}"):
            st.dataframe(rows, key=f"table_{key}", hide_index=True, width="stretch", alt=title)


def _rest(comparison: Comparison) -> list[tuple[str, str, list[dict[str, object]]]]:
    """What else has to be equal; what was not checked is left out."""
    checked = [
        ("buffers", "Buffers after the step", buffer_table(comparison)),
        ("inputs", "Gradients of the inputs", diff_table(comparison.input_gradients)),
        ("later", f"Gradients of step {comparison.n_steps}", diff_table(comparison.later_gradients)),
        ("parameters", f"Parameters after {comparison.n_steps} steps", parameter_table(comparison)),
        ("carried", "What else the model carries on, where it differs", carried_table(comparison)),
        ("rng", "Positions of the random generators", rng_table(comparison)),
        ("masks", "Dropout masks, forward against recompute", mask_table(comparison)),
        ("state", "State that the recompute changed once more", state_change_table(comparison)),
        ("counts", "How often each block ran", recompute_count_table(comparison)),
    ]
    return [entry for entry in checked if entry[2]]
