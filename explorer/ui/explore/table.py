"""Every block as a row: saved bytes kept and recomputed, how often it ran, what it costs."""

from __future__ import annotations

import streamlit as st

from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.ui.shared.charts import draw, in_groups
from explorer.view.memory.blocks import operators_chart, saved_bytes_chart


def table_panel(run: Comparison | Measurement, *, block: str) -> None:
    """Saved bytes per block and, inside the selected one, per operator; all that is known of each as a table."""
    draw(saved_bytes_chart(run), key="saved")
    draw(operators_chart(run, block), key="operators")
    st.markdown("**Every block**")
    both = (run.baseline, run.candidate) if isinstance(run, Comparison) else (run, run)
    rows = _costs(*both)
    st.dataframe(
        rows, key="block_costs", hide_index=True, width="stretch", column_config=in_groups(rows),
        alt="What every block costs",
    )  # fmt: skip


def _costs(baseline: Measurement, candidate: Measurement) -> list[dict[str, object]]:
    """One row a block that ran."""
    rows = []
    for cost in candidate.blocks:
        before = baseline.by_fqn.get(cost.fqn)
        rows.append(
            {
                "block": cost.fqn or "(the model)",
                "ran in forward": cost.n_forward,
                "ran again": cost.n_recompute,
                "saved, kept (bytes)": before.saved_after_forward_bytes if before else None,
                "saved, candidate (bytes)": cost.saved_after_forward_bytes,
                "alive at the peak (bytes)": cost.at_peak_bytes,
                "recompute (FLOP)": cost.recompute_flops,
                "left out by early stop (FLOP)": cost.skipped_flops,
            }
        )
    return rows
