"""The drawn policy in the form of another program: its fit there, and the blocks that really run again."""

from __future__ import annotations

import streamlit as st

from explorer.errors import ExplorerError
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.names import listed
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy
from explorer.record.policy_file import Export, PolicyFile
from explorer.ui.explore.state import ExploreState
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.download import Offer, download
from explorer.ui.shared.readable import small

COLOURS = {"exact": "green", "approximated": "orange", "not expressible": "red"}
CHECKED = {
    "executed": "A test runs such exports and counts what ran again.",
    "grammar": "Written after its documents; no test could run it.",
}
MOST_NAMED = 12


def panel(state: ExploreState, graph: ModelGraph, file: PolicyFile, warning: str) -> None:
    """Draws a choice of programs, then the program's verdict, recompute and file. `warning` goes on top."""
    target = st.selectbox(
        "For another program",
        list(FORMATS),
        format_func=lambda name: FORMATS[name].title,
        key="export_target",
        help="The policy in the words of a framework, and what is lost on the way there.",
    )
    try:
        form = exported(file, target)
    except ExplorerError as error:
        small(f"{error} {error.hint or ''}".strip())
        return
    for sentence in sentences(form):
        small(sentence)
    if form.text:
        suffix = FORMATS[target].suffix
        text = (warning if suffix in (".py", ".yaml") else "") + form.text
        offer = Offer(f"For {FORMATS[target].title}", f"policy-{target}{suffix}", text, icon="code")
        download(offer, key="download_export", width="stretch")
    if form.fit == "approximated" and form.as_run is not None:
        st.button(
            "Draw what it will do there",
            key="draw_export",
            icon=":material/draw:",
            on_click=_draw,
            args=(state, graph, form.as_run),
            width="stretch",
            help="As a policy that Run measures; undo brings yours back.",
        )


def sentences(form: Export) -> list[str]:
    """Markdown: the fit, the blocks, the losses, the notes."""
    lines = [f":{COLOURS[form.fit]}-badge[{form.fit}] in {form.written_for}. {CHECKED[form.checked]}"]
    if form.recomputed is not None and form.fit != "not expressible":
        names = listed([f"`{fqn}`" if fqn else "the model" for fqn in form.recomputed], MOST_NAMED)
        lines.append(f"It recomputes {names or 'nothing'}.")
    return [*lines, *form.reasons, *form.notes]


def _draw(state: ExploreState, graph: ModelGraph, policy: Policy) -> None:
    drafts.set_policy(state.draft, policy, graph)
