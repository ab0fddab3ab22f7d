"""Hazards known before a run, one box per hazard with its remedy."""

from __future__ import annotations

from typing import Literal

import streamlit as st

from explorer.record.graph import Hazard

SEVERITIES: dict[str, Literal["red", "orange", "gray"]] = {"error": "red", "warning": "orange", "note": "gray"}


def hazards_panel(hazards: tuple[Hazard, ...]) -> None:
    """Draws the list, or that it is empty."""
    if not hazards:
        st.caption("No known hazard in this policy on this model.")
    for hazard in hazards:
        with st.container(border=True, gap="xsmall"):
            st.badge(hazard.severity, color=SEVERITIES[hazard.severity])
            st.text(f"{hazard.sentence}\nRemedy: {hazard.remedy}\nBlocks: {', '.join(hazard.blocks) or 'all'}")
