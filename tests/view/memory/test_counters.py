"""What a caching allocator took beside what was asked for; nothing is drawn that none said."""

from __future__ import annotations

from explorer.view.compare.headline import headlines
from explorer.view.memory.bands import ALLOCATED, RESERVED
from explorer.view.memory.stacked import roles
from explorer.view.memory.timeline import timeline
from tests.view.builders import MIB, measured
from tests.view.memory.made_up import cut, on_cuda


def test_a_caching_allocators_curves_stand_above_the_line_and_inside_the_picture() -> None:
    run = on_cuda(measured())
    fig = timeline(run).figure
    drawn = {trace.name: trace for trace in fig.data if trace.name in (ALLOCATED, RESERVED)}
    assert set(drawn) == {"allocated (derived)", "reserved"}
    for name, curve in ((ALLOCATED, run.peaks.allocated), (RESERVED, run.peaks.reserved)):
        assert drawn[name].line.dash == "dot" and drawn[name].showlegend
        assert [y * MIB for y in drawn[name].y] == [curve[point[1]] for point in drawn[name].customdata]
    assert fig.layout.yaxis.range[1] * MIB > run.peaks.reserved_peak_bytes
    assert {trace.name for trace in roles(run).figure.data} >= {ALLOCATED, RESERVED}


def test_what_no_caching_allocator_said_is_not_drawn() -> None:
    run = measured()
    assert not {ALLOCATED, RESERVED} & {trace.name for trace in timeline(run).figure.data}
    assert "allocator's" not in timeline(run).figure.layout.title.subtitle.text + headlines(run)[0].tooltip
    short = cut(on_cuda(run), run.forward_end_tick)
    assert not {ALLOCATED, RESERVED} & {trace.name for trace in timeline(short).figure.data}
