"""Download buttons for all files that leave the app, reports of runs among them. A press does not change the page.

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
from msgspec.structs import replace
from streamlit import runtime

from explorer.errors import ExplorerError
from explorer.jobs.run_file import name_of
from explorer.plan.export.traces import RUN_EXPORTS, runs_in
from explorer.ui.session import backend
from explorer.ui.session.repository import runs
from explorer.view.report.report import Reported, ReportOf, report_text

N_FILES = 16
"""Number of files that stay in memory."""
TYPES = {
    ".csv": "text/csv",
    ".dot": "text/vnd.graphviz",
    ".html": "text/html",
    ".json": "application/json",
    ".run": "application/octet-stream",
    ".yaml": "application/yaml",
    ".zip": "application/zip",
}

TRACES = {
    ".perfetto.json": (
        "For Perfetto (JSON)", "Counters by role, phases and blocks as slices, arrows to recomputes: ui.perfetto.dev."
    ),
    ".speedscope.json": ("For speedscope (JSON)", "Alive at the peak, by block, role and operator: speedscope.app."),
}  # fmt: skip
"""Label and help by suffix."""

_slots = itertools.count()


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
    data = offer.data
    st.download_button(
        offer.label,
        data=data if isinstance(data, str) else lambda: _stored(data(), mime, offer.file_name),
        file_name=offer.file_name,
        mime=mime,
        key=key,
        icon=f":material/{offer.icon}:",
        on_click="ignore",
        width=width,
        help=offer.help,
    )


def _stored(text: str | bytes, mime: str, file_name: str) -> bytes:
    """The bytes of a file that stays until N_FILES others were made."""
    data = text.encode() if isinstance(text, str) else text
    if runtime.exists():
        slot = f"download {next(_slots) % N_FILES}"
        files = runtime.get_instance().media_file_mgr
        files.add(data, mime, slot, file_name=file_name, is_for_static_download=True)
    return data


def report_bytes(key: str) -> bytes:
    """The report of the run under `key`, with hazards if the model was described lately."""
    return report_text(_report_of(key)).encode()


def report_button(
    key: str, *, stem: str, widget: str, label: str = "Report (HTML)", width: Literal["content", "stretch"] = "content"
) -> None:
    """Offers the report of the run under `key`; `stem` of the file, `widget`: key of the button."""
    about = "One HTML file to hand on: figures, charts, verdict, environment. No server, no network."
    offer = Offer(label, f"{stem}.html", lambda: report_bytes(key), icon="article", help=about)
    download(offer, key=widget, width=width)


def trace_buttons(key: str, *, stem: str, widget: str) -> None:
    """Offers the memory of the run under `key` to Perfetto and speedscope, in a column."""
    for suffix, (label, about) in TRACES.items():
        offer = Offer(
            label,
            f"{stem}{suffix}",
            lambda write=RUN_EXPORTS[suffix]: write(runs_in(runs().record(key))),  # type: ignore[misc]
            icon="timeline",
            help=about,
        )
        download(offer, key=f"{widget}{suffix}", width="stretch")


def _report_of(key: str) -> ReportOf:
    run = runs().record(key)
    assert isinstance(run, Reported), "every kind of run has a report"
    try:
        stored = next((stored for stored in backend.store().list() if stored.run_id == key), None)
    except ExplorerError:  # a run that the store could not keep has a report all the same
        stored = None
    name, created = (stored.name, stored.created) if stored is not None else (name_of(run), None)
    of = ReportOf(run=run, name=name, created=created)
    return replace(of, graph=runs().graph(of.spec))
