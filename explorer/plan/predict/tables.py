"""Tables of one recorded step, from which a page without Python forecasts any policy to the byte.

What depends on one unit alone is computed here: calls.py and step_cost.py run for every unit that a reader can choose.
What depends on the whole policy is computed by view/report/replay.js, which repeats changes.py by the same rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from explorer.plan.names import Fqns
from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.calls import SavedByCall, calls_of, norms_below, results_unknown, stash_bytes
from explorer.plan.predict.changes import freed_again_at
from explorer.plan.predict.not_predicted import not_predicted
from explorer.plan.predict.replay import Replay, graph_under
from explorer.plan.predict.step_cost import overhead_ms, rerun_scale, run_again, unit_flops, unit_ms, with_equal_times
from explorer.record.base import Column, Record, column
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, Unit

OPTIONS = Policy()
"""The options that the tables hold for."""


class CallTable(Record):
    """A call of a unit that saves tensors; the fields are those of SavedByCall."""

    first: int
    end: int
    backward_begins: int
    backward_ends: int
    late_bytes: int
    rerun_bytes: int
    statistics_bytes: int
    entries: Column
    freed_at: Column
    freed_again_at: Column
    """The tick at which a rerun of a unit around this one frees each entry."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    results: tuple[tuple[int, int, int], ...]
    """`SavedByCall.kept_results`."""
    in_containers: tuple[tuple[int, Fqns], ...]
    """Each input that comes inside a container alone, and the innermost blocks that save it."""
    copies: tuple[tuple[str, int, int, int], ...]
    """Norm, first tick, end tick and bytes; a unit inside that holds the norm makes the copy instead."""


_AS_THEY_ARE = (
    "first", "end", "backward_begins", "backward_ends", "late_bytes", "rerun_bytes", "statistics_bytes", "inputs",
    "outputs", "saved_outputs",
)  # fmt: skip


class UnitTable(Record):
    """A unit that a reader can choose, and its cost alone."""

    blocks: Fqns
    save_ops: Fqns
    calls: tuple[CallTable, ...]
    flops: int | None
    """FLOPs of the rerun; None: not counted."""
    ms: float | None
    overhead_ms: float
    n_forward: int
    """Calls of the last block."""
    last_saved_in: str
    """The block that saves the last tensor: the rerun of a unit inside that holds it replaces the end of this rerun."""
    refusal: str
    """Why no peak is predicted; empty where it is."""


class StepTables(Record):
    """One step with everything kept, and the units of its model."""

    n_ticks: int
    n_bytes: Column
    born: Column
    died: Column
    restored_until: Column
    """The tick at which each entry dies if a rerun has made it again."""
    casts: Column
    forward_end_tick: int | None
    saved_after_forward_bytes: int | None
    total_flops: int | None
    step_ms: float | None
    rerun_scale: float | None
    stash_bytes: int
    windows: dict[str, tuple[tuple[int, int], ...]]
    """First and last tick of each call, by block."""
    units: tuple[UnitTable, ...]


MOST_EVENTS = 100_000
"""Events of a step, beyond which there are no tables: a page of them would be too large to open."""
MOST_IN_SEGMENTS = 40_000
"""Entries in the tables of segments, shortest segments first: a chain of 1,000 blocks has 500,000 segments."""


def step_tables(run: Measurement, graph: ModelGraph, units: Iterable[Unit] = ()) -> StepTables | None:
    """The tables of `run` for each block, for segments of neighbours, and for `units`; None: nothing is forecast."""
    graph = graph_under(run, graph) or graph
    baseline = keep_all_from(run, graph)
    replay = None if baseline is None else Replay.of(baseline, graph)
    if baseline is None or replay is None or len(replay.line) > MOST_EVENTS:
        return None
    timed = with_equal_times(baseline, graph)
    blocks = [Unit(blocks=(block.fqn,)) for block in graph.blocks if block.fqn and block.n_calls]
    tables = {unit: _unit_table(replay, timed, graph, unit) for unit in dict.fromkeys([*blocks, *units])}
    n_entries = 0
    for unit in _segments(graph):
        if unit not in tables:
            tables[unit] = _unit_table(replay, timed, graph, unit)
            n_entries += 1 + sum(len(call.entries) for call in tables[unit].calls)
            if n_entries > MOST_IN_SEGMENTS:
                break
    return StepTables(
        n_ticks=len(replay.line) - 1,
        n_bytes=column(replay.size.tolist()),
        born=column(replay.born.tolist()),
        died=column(replay.died.tolist()),
        restored_until=column(replay.restored_until.tolist()),
        casts=column(replay.casts.tolist()),
        forward_end_tick=baseline.forward_end_tick,
        saved_after_forward_bytes=baseline.saved_after_forward_bytes,
        total_flops=baseline.total_flops,
        step_ms=baseline.times.step.median_ms if baseline.times else None,
        rerun_scale=rerun_scale(timed),
        stash_bytes=stash_bytes(baseline, OPTIONS),
        windows={fqn: tuple((call.first, call.end) for call in calls) for fqn, calls in replay.calls.items()},
        units=tuple(tables.values()),
    )


def _segments(graph: ModelGraph) -> Iterator[Unit]:
    """Stretches of neighbours that can be recomputed as one segment, the shortest first."""
    following = {a: b for a, b in graph.next_in_turn.items() if graph.by_fqn[a].n_calls and graph.by_fqn[b].n_calls}
    stretches: list[Fqns] = list(following.items())
    while stretches:
        yield from (Unit(blocks=stretch) for stretch in stretches)
        stretches = [(*part, following[part[-1]]) for part in stretches if following.get(part[-1], part[0]) not in part]


def _unit_table(replay: Replay, timed: Measurement, graph: ModelGraph, unit: Unit) -> UnitTable:
    policy = Policy(units=(unit,))
    refusal = not_predicted(policy, graph)
    if unit.action == "offload":
        refusal = "This page does not predict offload: measure the policy, or ask plan --offload."
    unknown = results_unknown(replay, unit.save_ops)
    if unknown:
        refusal = f"The recorded step does not show the results of {', '.join(unknown)}."
    last = timed.by_fqn.get(unit.blocks[-1])
    ends_in = next((graph.by_fqn[fqn] for fqn in reversed(run_again(graph, unit.blocks, OPTIONS))), None)
    return UnitTable(
        blocks=unit.blocks,
        save_ops=unit.save_ops,
        calls=() if refusal else _call_tables(replay, graph, unit),
        flops=unit_flops(timed, graph, unit, (), OPTIONS),
        ms=unit_ms(timed, graph, unit, (), OPTIONS),
        overhead_ms=overhead_ms(timed, unit),
        n_forward=last.n_forward if last is not None else 0,
        last_saved_in=ends_in.last_saved_in if ends_in is not None else "",
        refusal=refusal,
    )


def _call_tables(replay: Replay, graph: ModelGraph, unit: Unit) -> tuple[CallTable, ...]:
    calls = calls_of(replay, graph, unit, OPTIONS)
    norms = norms_below(graph, unit.blocks) if any(call.copies for call in calls) else []
    # As if all other norms were recomputed inside the unit: the copies of one norm are left.
    copies: list[list[tuple[str, int, int, int]]] = [[] for _ in calls]
    for norm in norms:
        others = [other for other in norms if other != norm]
        for of_call, call in zip(copies, calls_of(replay, graph, unit, OPTIONS, others)):
            of_call += [(norm, *copy) for copy in call.copies]
    return tuple(map(partial(_call_table, replay), calls, copies))


def _call_table(replay: Replay, call: SavedByCall, copies: Iterable[tuple[str, int, int, int]]) -> CallTable:
    return CallTable(
        **{name: getattr(call, name) for name in _AS_THEY_ARE},
        entries=column(call.entries.tolist()),
        freed_at=column(call.freed_at.tolist()),
        freed_again_at=column(freed_again_at(replay, call).tolist()),
        results=call.kept_results,
        in_containers=tuple((entry, replay.saved_in.get(entry, ("",))) for entry in call.in_containers),
        copies=tuple(copies),
    )
