"""A caching allocator's own peaks in words."""

from __future__ import annotations

from explorer.view.compare.headline import headlines
from explorer.view.memory.timeline import timeline
from tests.view.builders import measured
from tests.view.memory.made_up import on_cuda


def test_a_caching_allocators_peaks_stand_beside_the_drawn_one() -> None:
    run = on_cuda(measured())
    expected = "allocator's peaks: 149.0 MiB requested, 150.0 MiB allocated, 298.0 MiB reserved"
    assert timeline(run).figure.layout.title.subtitle.text.endswith(expected)
    assert expected in headlines(run)[0].tooltip
    table = timeline(run).rows()
    assert max(row["peak reserved (bytes)"] for row in table) == run.peaks.reserved_peak_bytes
    assert max(row["peak allocated (derived) (bytes)"] for row in table) == run.step_peak_bytes + 512
