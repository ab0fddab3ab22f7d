"""Tables of a recorded memory history for its report. They stand apart from the reports of runs, which have a model."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.record.history import DeviceHistory
from explorer.record.measurement import Measurement
from explorer.view.report.html import paragraph, table
from explorer.view.text.runs import alive_rows, history_notes, history_rows, refusal_rows


def device_tables(device: DeviceHistory, run: Measurement) -> Iterator[str]:
    """Peaks under each of the options, refused requests, and what is alive at the peak."""
    yield table(history_rows(device))
    yield from (paragraph(note, "quiet") for note in history_notes(device))
    if device.refused:
        yield table(refusal_rows(device))
    yield table(alive_rows(run, "module"))
    yield table(alive_rows(run, "source line"))
