"""A run for somebody else: the report as one HTML file, and every chart of it as SVG in one archive."""

from __future__ import annotations

import io
import zipfile

from explorer.errors import BadInput, ExplorerError
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.ui.session import backend
from explorer.view.report.report import ReportOf, charts_of, report_text
from explorer.view.report.svg import svg


def report_bytes(key: str) -> bytes:
    """The report of the run under `key`; its hazards where the model was described lately."""
    return report_text(_report_of(key)).encode()


def charts_bytes(key: str) -> bytes:
    """All charts of the run under `key`, in a ZIP file."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name, chart in charts_of(_report_of(key).run).items():
            files.writestr(f"{name}.svg", svg(chart))
    return archive.getvalue()


def _report_of(key: str) -> ReportOf:
    run = backend.record(key)
    if not isinstance(run, (Comparison, Measurement)):
        raise BadInput("Only measurements and comparisons have a report.", hint="Choose one of those runs.")
    try:
        stored = next((stored for stored in backend.store().list() if stored.run_id == key), None)
    except ExplorerError:  # a run that the store could not keep has a report all the same
        stored = None
    shown = run.candidate if isinstance(run, Comparison) else run
    name, created = (stored.name, stored.created) if stored is not None else (shown.spec.model.target, None)
    return ReportOf(run=run, name=name, graph=backend.graph_of(shown.spec), created=created)
