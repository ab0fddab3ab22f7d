"""Consistency checks of a run. A checksum proves that a file is whole, not that its run is possible.

Types limit single fields. This file checks relations between fields: columns of one length, ticks in order, ranks that
exist, blocks that a graph has. A record without a fault can be drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from explorer import slices
from explorer.record.allocations import ROLES, Allocations, Saves
from explorer.record.base import Column, Record
from explorer.record.comparison import Comparison
from explorer.record.graph import INPUT, ModelGraph
from explorer.record.history import MemoryHistory
from explorer.record.measurement import Measurement, RecordedRanks

MOST_BYTES = 2**62


def unsound(record: Record) -> str:
    """The first fault of a run; empty: none."""
    return next(_unsound(record), "")


def _unsound(record: Record) -> Iterator[str]:
    if isinstance(record, Comparison):
        for name, run in (("baseline", record.baseline), ("candidate", record.candidate)):
            yield from (f"{name}: {fault}" for fault in _unsound(run))
    if isinstance(record, RecordedRanks):
        numbers = [run.rank for run in record.ranks]
        if not numbers:
            yield "no rank"
        if len(set(numbers)) < len(numbers) or any(rank is None or rank >= record.n_ranks for rank in numbers):
            yield f"ranks {', '.join(map(str, numbers[:9]))} of {record.n_ranks}"
        for run in record.ranks:
            yield from (f"rank {run.rank}: {fault}" for fault in _unsound(run))
    if isinstance(record, MemoryHistory):
        if not record.runs or len(record.runs) != len(record.devices):
            yield f"{len(record.runs)} timelines of {len(record.devices)} devices"
        for device, run in zip(record.devices, record.runs):
            yield from (f"{device.label}: {fault}" for fault in _unsound(run))
    if isinstance(record, Measurement) and record.allocations is not None:
        yield from _faults(record)
    for part in slices.parts("record.sound").values():
        yield from part.faults(record)
    if isinstance(graph := getattr(record, "graph", None), ModelGraph):
        yield from _graph(graph)


def _graph(graph: ModelGraph) -> Iterator[str]:
    names = set(graph.by_fqn)
    inside = names | {join.id for join in graph.joins} | {INPUT}
    named_and_there: dict[str, tuple[Set[object], Set[object]]] = {
        "parent": ({block.parent for block in graph.blocks}, names | {None}),
        "block before": ({block.follows for block in graph.blocks}, names | {None, ""}),
        "repeated block": ({block.repeat_of for block in graph.blocks}, names | {None}),
        "chain": (set(graph.chain), names if graph.chain == ("",) else names - {""}),  # no block was called
        "block of a join": ({join.block for join in graph.joins}, names),
        "edge": ({end for edge in graph.edges for end in (edge.source, edge.target)}, inside),
        "cut": ({end for cut in graph.cuts for end in (cut.after, cut.before)}, names),
    }
    if len(names) < len(graph.blocks) or "" not in names:
        yield "graph: a block is there twice, or the model itself is not"
    for what, (named, there) in named_and_there.items():
        for name in named - there:
            yield f"graph: {what} {name} is not there"


def _faults(run: Measurement) -> Iterator[str]:
    log = run.allocations
    assert log is not None
    if not 0 <= log.n_ticks <= len(log.born) * 2:
        yield f"{log.n_ticks} ticks for {len(log.born)} allocations"
        return
    yield from _columns(log)
    for span in run.phases:
        if not 0 <= span.first_tick <= span.end_tick <= log.n_ticks + 1:
            yield f"a phase from tick {span.first_tick} to {span.end_tick} of {log.n_ticks}"


def _columns(log: Allocations) -> Iterator[str]:
    n_rows, end = len(log.born), log.n_ticks + 1
    columns = {
        "n_bytes": (log.n_bytes, n_rows, MOST_BYTES),
        "born": (log.born, n_rows, log.n_ticks),
        "died": (log.died, n_rows, end),
        "role": (log.role, n_rows, len(ROLES) - 1),
        "block": (log.block, n_rows, len(log.blocks) - 1),
        "op": (log.op, n_rows, len(log.ops) - 1),
        "dtype": (log.dtype, n_rows if log.dtype else 0, len(log.dtypes) - 1),
        "stream": (log.stream, n_rows if log.stream else 0, n_rows),
        "line": (log.line, n_rows if log.line else 0, len(log.lines) - 1),
        "calls.line": (log.calls.line, len(log.calls.block) if log.calls.line else 0, len(log.lines) - 1),
        "weight_casts": (log.weight_casts, len(log.weight_casts), n_rows - 1),
        "released": (log.released, n_rows if len(log.released) else 0, end),
        "calls.block": (log.calls.block, len(log.calls.block), len(log.blocks) - 1),
        "calls.first_tick": (log.calls.first_tick, len(log.calls.block), end),
        "calls.end_tick": (log.calls.end_tick, len(log.calls.block), end),
        "calls.n_inputs": (log.calls.n_inputs, len(log.calls.block), len(log.calls.entries)),
        "calls.n_outputs": (log.calls.n_outputs, len(log.calls.block), len(log.calls.entries)),
        "calls.entries": (log.calls.entries, sum(log.calls.n_inputs) + sum(log.calls.n_outputs), n_rows - 1),
    }
    mosts = (n_rows - 1, len(log.blocks) - 1, len(log.saves.entry), MOST_BYTES, end, end, end)
    for name, most in zip(Saves.__struct_fields__, mosts):
        columns[f"saves.{name}"] = (getattr(log.saves, name), len(log.saves.entry), most)
    for name, (column, length, most) in columns.items():
        if fault := misfit(column, length, most):
            yield f"{name} {fault}"
    if len(log.time_ns) not in (0, end):
        yield f"time_ns has {len(log.time_ns)} entries for {end} ticks"
    if sum(log.n_bytes) > MOST_BYTES:
        yield f"{sum(log.n_bytes)} bytes in all"
    if any(born > died for born, died in zip(log.born, log.died)):
        yield "an allocation dies before it is born"


def misfit(column: Column, length: int, most: int, least: int = 0) -> str:
    """What is wrong with the length of a column or with its values; empty: nothing."""
    if len(column) != length:
        return f"has {len(column)} entries instead of {length}"
    fits = not column or least <= min(column) <= max(column) <= most
    return "" if fits else f"goes from {min(column)} to {max(column)}"
