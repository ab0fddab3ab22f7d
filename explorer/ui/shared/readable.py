"""Text readable at 4.5:1 that Streamlit would fade: badges in captions, words on the primary colour."""

from __future__ import annotations

import streamlit as st

ON_PRIMARY = "#0B1B2B"
"""Dark words on the light primary colour of the dark theme; Streamlit writes white in both."""


def small(text: str, *, help: str | None = None) -> None:
    """A line as small as a caption whose badges keep their colour: a caption fades all of it to 60 %."""
    st.markdown(f":small[{text}]", help=help)


def on_primary(label: str, *, disabled: bool = False) -> str:
    """The label of a primary button; a disabled button has no coloured ground."""
    if disabled or st.context.theme.type != "dark":
        return label
    return f':color[{label}]{{foreground="{ON_PRIMARY}"}}'
