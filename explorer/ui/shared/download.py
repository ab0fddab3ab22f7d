"""Whatever leaves the app as a file: one kind of button, and the page stays as it is when it is pressed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import Literal, NamedTuple

import streamlit as st

TYPES = {
    ".csv": "text/csv",
    ".dot": "text/vnd.graphviz",
    ".html": "text/html",
    ".run": "application/octet-stream",
    ".yaml": "application/yaml",
    ".zip": "application/zip",
}


class Offer(NamedTuple):
    """A file to take away, under the words of its button."""

    label: str
    file_name: str
    data: str | Callable[[], str | bytes]
    """A function is called when the button is pressed, not while the page is drawn."""
    icon: str = "download"
    help: str | None = None


def download(offer: Offer, *, key: str, width: Literal["content", "stretch"] = "content") -> None:
    """A button; the type of the file follows from its name."""
    st.download_button(
        offer.label,
        data=offer.data,
        file_name=offer.file_name,
        mime=TYPES.get(PurePath(offer.file_name).suffix, "text/plain"),
        key=key,
        icon=f":material/{offer.icon}:",
        on_click="ignore",
        width=width,
        help=offer.help,
    )
