"""What recomputing costs: operations counted per block, time with its spread, and what early stop left out."""

from __future__ import annotations

import streamlit as st

from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.ui.shared.charts import draw
from explorer.ui.shared.readable import small
from explorer.view.compare.cost import (
    recompute_cost,
    recompute_time,
    step_time,
    time_answer,
    uncounted_in_words,
)
from explorer.view.drawing.units import flops, milliseconds
from explorer.view.text import explore as glossary

PARTS = ("step", "forward", "backward", "optimizer")
OPERATIONS, TIME, STEP = "Operations per block", "Time per block", "Time of the step"


def cost_panel(comparison: Comparison) -> None:
    """FLOPs and times of both runs, then those of each recomputed block."""
    st.markdown(glossary.NO_CLOCK if comparison.is_predicted else time_answer(comparison), help=glossary.COST)
    st.dataframe(
        [_row("baseline", comparison.baseline), _row("candidate", comparison.candidate)],
        key="cost_totals", hide_index=True, width="stretch", alt="FLOPs and times of both runs",
    )  # fmt: skip
    if left_out := uncounted_in_words(comparison.candidate):
        small(f":orange[{left_out}.]")
    view = st.segmented_control(
        "View",
        [OPERATIONS, TIME, STEP],
        default=OPERATIONS,
        key="cost_view",
        required=True,
        label_visibility="collapsed",
    )
    chart = {OPERATIONS: recompute_cost, TIME: recompute_time, STEP: step_time}[view or OPERATIONS]
    draw(chart(comparison), key=f"cost_{chart.__name__}")


def _row(name: str, run: Measurement) -> dict[str, str]:
    row = {
        "run": name,
        "forward": flops(run.forward_flops),
        "recompute": flops(run.recompute_flops),
        "backward": flops(run.backward_flops),
    }
    for part in PARTS:
        row[f"{part} time"] = milliseconds(getattr(run.times, part) if run.times else None)
    return row
