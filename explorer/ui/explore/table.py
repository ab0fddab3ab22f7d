"""Every block as a row: saved bytes kept and recomputed, how often it ran, what it costs."""

from __future__ import annotations

import streamlit as st

from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.ui.shared.charts import draw
from explorer.view.memory.blocks import saved_bytes_chart


def table_panel(run: Comparison | Measurement) -> None:
    """Saved bytes per block as a chart, and the whole bill as a table."""
    draw(saved_bytes_chart(run), key="saved")
    st.markdown("**Every block**")
    both = (run.baseline, run.candidate) if isinstance(run, Comparison) else (run, run)
    st.dataframe(_bill(*both), key="bill", hide_index=True, width="stretch", alt="Bill of every block")


def _bill(baseline: Measurement, candidate: Measurement) -> list[dict[str, object]]:
    """One row a block that ran."""
    rows = []
    for bill in candidate.blocks:
        before = baseline.by_fqn.get(bill.fqn)
        rows.append(
            {
                "block": bill.fqn or "(the model)",
                "ran in forward": bill.n_forward,
                "ran again": bill.n_recompute,
                "saved, kept (bytes)": before.saved_after_forward_bytes if before else None,
                "saved, candidate (bytes)": bill.saved_after_forward_bytes,
                "alive at the peak (bytes)": bill.at_peak_bytes,
                "recompute (FLOP)": bill.recompute_flops,
                "left out by early stop (FLOP)": bill.skipped_flops,
            }
        )
    return rows
