"""What a run file may hold can be drawn: one field of a run at a time is given any value of its type. What the limits
and the soundness of a record let pass has a report with its charts; the rest is one sentence."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.errors import UnreadableFile
from explorer.jobs import run_file
from explorer.record import Measurement, RunSpec
from explorer.record.base import Record, from_msgpack, from_plain
from explorer.view.report.html import plotly_js
from explorer.view.report.parts import ReportOf
from explorer.view.report.report import report_text
from explorer.view.text.runs import figures_of
from tests import graphs, mutations
from tests.view.builders import compared, measured
from tests.view.report.kinds import KINDS

GRAPH = graphs.gpt(4)
RECORDS: dict[str, Any] = {
    **KINDS,
    "measurement": run_file.with_graph(measured(), GRAPH),
    "comparison": run_file.with_graph(compared(), GRAPH),
}
PLACES = [(name, path, kind) for name, record in RECORDS.items() for path, kind in mutations.places(record)]
LARGEST = len(plotly_js()) + 1_000_000
"""Letters of a report of these small runs, whatever one field says."""


def opened(document: Any, kind: type[Record], created: float = 1.0) -> Any:
    """The record in a file that holds `document`. Raises UnreadableFile."""
    stored = run_file.stored_record(from_plain(document, kind), "n")
    read = run_file.read(run_file.write(msgspec.structs.replace(stored, created=created)))
    return from_msgpack(read.record, kind)


def draw(run: Any) -> None:
    text = report_text(ReportOf(run=run, name=run_file.name_of(run), created=1.0))
    assert len(text) < LARGEST
    if hasattr(run, "headlines"):
        json.dumps(run.headlines())
    if isinstance(run, Measurement):
        figures_of(run)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_passes_is_drawn(data: st.DataObject) -> None:
    name, path, kind = data.draw(st.sampled_from(PLACES))
    values = mutations.values(kind, mutations.at(RECORDS[name], path))
    if not values:
        return
    document = mutations.changed(RECORDS[name], path, data.draw(st.sampled_from(values)))
    try:
        run = opened(document, type(RECORDS[name]))
    except UnreadableFile as error:
        assert len(str(error)) < 1000
        return
    draw(run)


FORGED: list[tuple[str, tuple[str | int, ...], Any]] = [
    ("ranks", ("n_ranks",), 2**31),
    ("ranks", ("n_ranks",), 10**6),
    ("ranks", ("ranks",), []),
    ("measurement", ("spec", "n_repeats"), 10**18),
    ("measurement", ("spec", "n_threads"), -1),
    ("comparison", ("candidate", "spec", "seed"), 2**62),
    ("pipeline", ("spec", "plan", "n_microbatches"), 10**9),
    ("pipeline", ("spec", "plan", "n_ranks"), 0),
    ("pipeline", ("composed", "ranks"), []),
    ("pipeline", ("composed", "actions", 0, "rank"), 10**5),
    ("pipeline", ("memory", 0, "held_bytes"), []),
    ("measurement", ("graph", "blocks"), []),
    ("measurement", ("graph", "chain"), ["nowhere"]),
    ("measurement", ("environment", "total_memory_bytes"), -5),
    ("measurement", ("blocks", 0, "forward", "ms"), [float("nan")]),
]


@pytest.mark.parametrize(("name", "path", "value"), FORGED)
def test_what_cannot_have_happened_is_refused(name: str, path: tuple[str | int, ...], value: Any) -> None:
    opened(mutations.to_plain(RECORDS[name]), type(RECORDS[name]))
    with pytest.raises(UnreadableFile):
        opened(mutations.changed(RECORDS[name], path, value), type(RECORDS[name]))


@pytest.mark.parametrize("created", [1e300, float("inf"), -1e18, float("nan")])
def test_a_date_that_is_none_is_refused(created: float) -> None:
    with pytest.raises(UnreadableFile, match="created"):
        opened(mutations.to_plain(RECORDS["pipeline"]), type(RECORDS["pipeline"]), created)


def test_many_ranks_are_one_short_report() -> None:
    """The ranks that left no file are named in a few words."""
    ranks = opened(mutations.changed(RECORDS["ranks"], ("n_ranks",), 2**16), type(RECORDS["ranks"]))
    draw(ranks)


def test_a_spec_at_its_limits_is_drawn() -> None:
    spec = RECORDS["measurement"].spec
    largest = {"n_repeats": 1000, "n_threads": 1024, "seed": 2**53 - 1, "n_accumulation": 4096}
    assert set(largest) <= set(RunSpec.__struct_fields__)
    run = msgspec.structs.replace(RECORDS["measurement"], spec=msgspec.structs.replace(spec, **largest))
    draw(opened(mutations.to_plain(run), Measurement))
