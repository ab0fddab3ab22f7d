"""A page with nothing but the block graph, for tests and figures: `streamlit run graph_page.py`, `?kind=gpt&n=12`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import streamlit as st  # noqa: E402

from explorer.ui import components as bg  # noqa: E402
from explorer.view.graph.geometry import layout  # noqa: E402
from explorer.view.graph.labels import Badge, Label  # noqa: E402
from explorer.view.graph.nesting import default_open, nest  # noqa: E402
from tests import graphs  # noqa: E402

kind, n = st.query_params.get("kind", "gpt"), int(st.query_params.get("n", "12"))
st.set_page_config(layout="wide")
MADE = {"gpt": lambda: graphs.gpt(n), "unet": graphs.unet, "hostile": graphs.hostile}
graph = MADE[kind]() if kind in MADE else graphs.gpt(n, n_inner=5)
S = st.session_state
if "state" not in S:
    S.state = bg.GraphMarks(open=list(nest(graph) if kind == "wide" else default_open(graph)))
    S.on = []


def take(*, until_press: bool = False) -> None:
    for step in bg.new_steps(S.state, S.get("graph"), until_press=until_press):
        if step.kind == "on":
            S.on = bg.flipped(S.on, step.ids)
        bg.look(S.state, step)


def preset() -> None:
    take(until_press=True)
    S.on = [f"blocks.{i}" for i in range(0, n, 2)]


@st.fragment
def panel() -> None:
    take()
    st.button("Every second", key="preset", on_click=preset)
    on = set(S.on)
    labels = {
        block.fqn: Label(
            bytes=f"{block.saved_bytes / 2**20:.1f}{' → 0.5' if block.fqn in on else ''} MiB",
            note="ran 2×" if block.fqn in on else "",
            badges=(Badge(sign="⚄", severity="note", text="Draws random numbers."),) if block.uses_rng else (),
            title=block.fqn,
        )
        for block in graph.blocks
    }
    paint = bg.Paint(height=600, labels=labels)
    drawing = layout(graph, S.state.open, cuts=kind == "unet")
    bg.block_graph(drawing, S.state, paint, {"on": S.on}, key="graph")
    st.text("confirmed: " + (" ".join(sorted(on)) or "none"))
    st.text("cuts: " + " ".join(sorted(S.state.cuts)) + " selected: " + S.state.selected)


if st.button("Remove"):
    S.removed = not S.get("removed")
if not S.get("removed"):
    panel()
