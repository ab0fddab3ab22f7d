"""Exports of a run's memory, held to the rules of their formats: Chrome's trace events and speedscope's schema."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan.export.traces import SCHEMA, perfetto, recomputed_calls, runs_in, speedscope
from explorer.plan.memory.ledger import ledger
from explorer.record import ROLES, Measurement
from explorer.record.allocations import Allocations, Calls, PhaseSpan
from explorer.record.base import column
from tests.view.builders import compared, measured, on_cuda


def with_calls(run: Measurement, *, timed: bool = True) -> Measurement:
    """Block 1 is called twice in forward; both calls run again, the last one first."""
    log = run.allocations
    assert log is not None
    end = log.n_ticks + 1
    calls = Calls(
        block=column([0, 1, 1]), first_tick=column([0, 1, 3]), end_tick=column([6, 3, 5]),
        n_inputs=column([0] * 3), n_outputs=column([0] * 3),
    )  # fmt: skip
    name = log.blocks[1]
    phases = (
        PhaseSpan(phase="forward", block="", first_tick=0, end_tick=6),
        PhaseSpan(phase="recompute", block=name, first_tick=6, end_tick=8),
        PhaseSpan(phase="backward", block="", first_tick=8, end_tick=9),
        PhaseSpan(phase="recompute", block=name, first_tick=9, end_tick=end),
    )
    times = log.time_ns if timed else column()
    return replace(run, allocations=replace(log, calls=calls, time_ns=times), phases=phases)


def log_of(run: Measurement) -> Allocations:
    assert run.allocations is not None
    return run.allocations


def events_of(text: str) -> list[dict[str, Any]]:
    """The events, each with the fields that its phase has to have."""
    document = json.loads(text)
    assert document["displayTimeUnit"] in ("ms", "ns")
    fields = {"X": {"dur", "cat"}, "C": {"args"}, "s": {"id", "cat"}, "f": {"id", "cat", "bp"}, "M": {"args"}}
    for event in document["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts"} | fields[event["ph"]] <= event.keys()
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


@pytest.mark.parametrize("timed", [True, False])
def test_a_trace_keeps_the_rules_of_its_format(timed: bool) -> None:
    run = with_calls(on_cuda(measured()), timed=timed)
    events = events_of(perfetto({"run": run}))
    slices: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for lane in slices.values():  # complete events of one thread nest
        for first, end in lane:
            assert all(
                b <= first or a >= end or (a <= first and end <= b) or (first <= a and b <= end) for a, b in lane
            )
    flows = [event for event in events if event["ph"] in "sf"]
    for event in flows:  # an arrow binds to the slice around it
        assert any(a <= event["ts"] <= b for a, b in slices[event["tid"]])
    assert [event["id"] for event in flows] == [1, 1, 2, 2] and {e["bp"] for e in flows if e["ph"] == "f"} == {"e"}
    names = {(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert ("thread_name", "phases") in names and any(what == "process_name" for what, _ in names)


def test_counters_are_the_ledger_at_the_peak() -> None:
    """Second method: the ledger sums entries, a counter sums changes."""
    run = on_cuda(measured())
    at = ledger(run)
    peak_us = log_of(run).time_ns[at.tick] / 1000
    values: dict[str, int] = {}
    for event in events_of(perfetto({"run": run})):
        if event["ph"] == "C" and event["ts"] <= peak_us:
            values[event["name"]] = event["args"]["bytes"]
    assert {role: values.get(role, 0) for role in ROLES} == at.by_role
    assert values["bytes held"] == at.total_bytes == run.step_peak_bytes
    assert values["allocated"] == at.total_bytes + 512 and values["reserved"] == run.peaks.reserved_peak_bytes


def test_the_last_call_is_recomputed_first() -> None:
    assert recomputed_calls(with_calls(measured())) == [(2, 6), (1, 9)]


def test_a_profile_keeps_the_rules_of_its_format() -> None:
    run = measured()
    document = json.loads(speedscope({"run": run}))
    assert document["$schema"] == SCHEMA and document.keys() >= {"shared", "profiles"}
    frames = document["shared"]["frames"]
    assert all(isinstance(frame["name"], str) for frame in frames)
    (profile,) = document["profiles"]
    assert profile.keys() == {"type", "name", "unit", "startValue", "endValue", "samples", "weights"}
    assert (profile["type"], profile["unit"]) == ("sampled", "bytes")
    assert len(profile["samples"]) == len(profile["weights"])
    assert all(0 <= frame < len(frames) for sample in profile["samples"] for frame in sample)
    by_role: dict[str, int] = dict.fromkeys(ROLES, 0)
    for sample, weight in zip(profile["samples"], profile["weights"]):
        by_role[frames[sample[-2]]["name"]] += weight
    assert by_role == ledger(run).by_role
    assert sum(profile["weights"]) == profile["endValue"] == run.step_peak_bytes


def test_every_run_of_a_record_is_a_process_of_its_own() -> None:
    comparison = compared()
    events = events_of(perfetto(runs_in(comparison)))
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["baseline", "candidate"]
    assert len(json.loads(speedscope(runs_in(comparison)))["profiles"]) == 2
    with pytest.raises(BadInput, match="no memory timeline"):
        runs_in(replace(measured(), allocations=None))
