"""The report of a run as one HTML file, offered as a download."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from explorer.errors import ExplorerError
from explorer.jobs.run_file import name_of
from explorer.ui.session import backend
from explorer.ui.shared.download import Offer, download
from explorer.view.report.parts import Reported, ReportOf
from explorer.view.report.report import report_text


def report_bytes(key: str) -> bytes:
    """The report of the run under `key`, with hazards if the model was described lately."""
    return report_text(_report_of(key)).encode()


def report_button(
    key: str, *, stem: str, widget: str, label: str = "Report (HTML)", width: Literal["content", "stretch"] = "content"
) -> None:
    """Offers the report of the run under `key`; `stem` of the file, `widget`: key of the button."""
    about = "One HTML file for somebody else: figures, charts, verdict, environment. No server, no network."
    offer = Offer(label, f"{stem}.html", lambda: report_bytes(key), icon="article", help=about)
    download(offer, key=widget, width=width)


def _report_of(key: str) -> ReportOf:
    run = backend.record(key)
    assert isinstance(run, Reported), "every kind of run has a report"
    try:
        stored = next((stored for stored in backend.store().list() if stored.run_id == key), None)
    except ExplorerError:  # a run that the store could not keep has a report all the same
        stored = None
    name, created = (stored.name, stored.created) if stored is not None else (name_of(run), None)
    of = ReportOf(run=run, name=name, created=created)
    return replace(of, graph=backend.graph_of(of.spec))
