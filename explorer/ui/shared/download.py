"""Download buttons for all files that leave the app. A press does not change the page.

A file made on a press is shown by no page, and Streamlit drops such a file after two reruns of any page. A page that
watches a job reruns several times a second, so a browser on a busy machine would request the file in vain. The last
few files therefore stay in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import PurePath
from typing import Literal, NamedTuple

import streamlit as st
from streamlit import runtime

N_HELD = 16
TYPES = {
    ".csv": "text/csv",
    ".dot": "text/vnd.graphviz",
    ".html": "text/html",
    ".run": "application/octet-stream",
    ".yaml": "application/yaml",
    ".zip": "application/zip",
}


_places = itertools.count()


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
    mime = TYPES.get(PurePath(offer.file_name).suffix, "text/plain")
    made = offer.data
    st.download_button(
        offer.label,
        data=made if isinstance(made, str) else lambda: _held(made(), mime, offer.file_name),
        file_name=offer.file_name,
        mime=mime,
        key=key,
        icon=f":material/{offer.icon}:",
        on_click="ignore",
        width=width,
        help=offer.help,
    )


def _held(made: str | bytes, mime: str, file_name: str) -> bytes:
    """The bytes of a file that stays until N_HELD others were made."""
    data = made.encode() if isinstance(made, str) else made
    if runtime.exists():
        place = f"download {next(_places) % N_HELD}"
        files = runtime.get_instance().media_file_mgr
        files.add(data, mime, place, file_name=file_name, is_for_static_download=True)
    return data
