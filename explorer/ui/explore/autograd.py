"""The autograd graph of one block, kept and recomputed, drawn in the browser."""

from __future__ import annotations

from typing import Literal

import streamlit as st

from explorer.record.graph import AutogradPicture, AutogradPictures, ModelGraph
from explorer.ui.shared.download import Offer, download
from explorer.view.graph.dot import caption, difference, themed

WINDOW = 560
"""Pixels of height through which a picture of full size is seen."""
LARGE = 150
"""Nodes from which the browser's layout takes seconds."""


def autograd_panel(graph: ModelGraph, pictures: AutogradPictures | None, *, block: str, busy: bool) -> str | None:
    """Returns the block that a person asked to be drawn, else None."""
    st.caption(
        "What autograd records during forward: one node an operation, and the tensors each one saves for backward. "
        "Recomputed blocks save their input; the rest is made again when backward arrives."
    )
    called = [known.fqn for known in graph.blocks if known.fqn and known.n_calls]
    if not called:
        st.caption("This model has no block inside it that its forward calls; there is no picture to choose.")
        return None
    choice, button = st.columns([5, 2], vertical_alignment="bottom")
    with choice:
        drawn = pictures.block if pictures else ""
        usual = next((fqn for fqn in (block, drawn, *graph.repeats) if fqn in called), called[0])
        chosen = st.selectbox("Block", called, index=called.index(usual), key=f"autograd_block_{usual}")
    with button:
        asked = st.button(
            "Draw", icon=":material/account_tree:", key="draw", disabled=busy, width="stretch",
            help="Runs the block's forward twice in the worker: kept and recomputed.",
        )  # fmt: skip
    if pictures is not None:
        st.text(difference(pictures))
        full = st.toggle("Full size", key="autograd_full", help="As large as its words need, to be scrolled.")
        kept, recomputed = (st.container(), st.container()) if full else st.columns(2, gap="small")
        with kept:
            _picture(f"{pictures.block} kept", pictures.kept, "kept", full=full)
        with recomputed:
            _picture(f"{pictures.block} recomputed", pictures.recomputed, "recomputed", full=full)
    return chosen if asked else None


def _picture(title: str, picture: AutogradPicture, key: str, *, full: bool) -> None:
    st.text(title)
    st.caption(caption(picture))
    download(Offer("DOT file", f"autograd-{key}.dot", picture.dot), key=f"dot_{key}")
    if picture.n_nodes > LARGE and not st.toggle(f"Draw all {picture.n_nodes} nodes", key=f"large_{key}"):
        return
    dark = st.context.theme.type == "dark"
    with st.container(height=WINDOW if full else "content", key=f"autograd_{key}"):
        width: Literal["content", "stretch"] = "content" if full else "stretch"
        st.graphviz_chart(themed(picture.dot, dark=dark), width=width, alt=f"Autograd graph of {title}")
