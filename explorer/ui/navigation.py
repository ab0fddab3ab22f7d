"""Which pages there are, in which order."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from threading import Event, Lock

import streamlit as st

from explorer import slices
from explorer.ui.components import key_sheet
from explorer.ui.explore import page as explore
from explorer.ui.runs import page as runs
from explorer.ui.session import backend, window
from explorer.ui.session.values import GO_TO, mend_reruns

TAB_ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">
<path fill="none" stroke="#4596E4" stroke-width="2" d="M9 7h3v10h4M12 9h4"/>
<path fill="#4596E4" d="M2 3h8v8H2zM14 5h8v7h-8zM14 13h8v7h-8z"/></svg>"""
"""A block and the two behind it. Drawn here: a browser fetches Streamlit's own symbols for a tab from a server."""
PAGES_OF_SLICES = slices.parts("ui.page")

WORDMARK = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 196 24" role="img" aria-label="Checkpoint Explorer">
<path fill="none" stroke="#4596E4" stroke-width="2" d="M9 7h3v10h4M12 9h4"/>
<path fill="#4596E4" d="M2 3h8v8H2zM14 5h8v7h-8zM14 13h8v7h-8z"/>
<text x="30" y="17" font-family="sans-serif" font-size="14" font-weight="600" fill="{ink}">Checkpoint Explorer</text>
</svg>"""
"""The same sign and the product's name, in the ink of the page."""

_one_visit, _tables_ready = Lock(), Event()
"""Tables need pandas, whose import takes a quarter of a second: it follows the first figures. No other visit draws
meanwhile, as Plotly fails on a pandas that is half imported."""


def main() -> None:
    """Configures the app and shows the chosen page."""
    mend_reruns()
    st.logo(WORDMARK.format(ink="#FAFAFA" if st.context.theme.type == "dark" else "#111111"), size="large")
    st.set_page_config(page_title="Checkpoint Explorer", page_icon=TAB_ICON, layout="wide")
    pages = {
        "explore": st.Page(
            explore.page, title="Explore", icon=":material/account_tree:", url_path="explore", default=True
        ),
        **{
            name: st.Page(part.page, title=part.TITLE, icon=part.ICON, url_path=name)
            for name, part in sorted(PAGES_OF_SLICES.items(), key=lambda item: item[1].PLACE)
        },
        "runs": st.Page(runs.page, title="Runs", icon=":material/database:", url_path="runs"),
    }
    st.session_state["pages"] = pages
    page = st.navigation(list(pages.values()), position="top")
    if (name := st.session_state.get(GO_TO)) is not None:
        if page.url_path != pages[name].url_path:
            st.switch_page(pages[name])
        del st.session_state[GO_TO]
    with nullcontext() if _tables_ready.is_set() else _one_visit:
        page.run()
        key_sheet()
        is_idle = window.is_known() and not backend.worker().open_jobs()
        if is_idle or "pandas" in sys.modules:
            import_module("pandas")
            _tables_ready.set()
