"""Bytes that no module owns: lines of the loss, of the training loop and of the model's own methods, and old graphs.

A policy names modules, so it cannot free these bytes. The sentences say which line of the user's code holds them. They
stand apart from ledger.py because the planner's refusal and the reasons of a run share them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from explorer.plan.memory.ledger import alive, array_of, cells_of, ledger, peak_tick
from explorer.plan.names import is_within, listed
from explorer.plan.sizes import mib
from explorer.record.allocations import ROLES, Allocations, Ledger
from explorer.record.measurement import Measurement

SAVED = ROLES.index("saved activation")
LEAST_SHARE = 0.25
"""Share of the peak from which code outside of modules is named."""
LEAST_GRAPH = 0.01
"""Share of the saved bytes below which what is left of a forward counts as no graph."""


def by_place(at: Ledger) -> dict[str, int]:
    """Bytes of each block, and of each line outside of all blocks, largest first."""
    totals: dict[str, int] = {}
    for cell in at.cells:
        totals[cell.place] = totals.get(cell.place, 0) + cell.n_bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def by_line(at: Ledger) -> dict[str, int]:
    """Bytes of each line outside of all blocks, largest first."""
    lines = {cell.line for cell in at.cells if cell.line}
    return {place: size for place, size in by_place(at).items() if place in lines}


def saved_beside(run: Measurement, blocks: Collection[str]) -> dict[str, int]:
    """Bytes saved after forward that lie in none of `blocks`, by place. With those of `blocks` they add up to all."""
    log, border = run.allocations, run.forward_end_tick
    if log is None or border is None:
        return {}
    totals: dict[str, int] = {}
    entries = alive(log, border)
    for cell in cells_of(log, entries[array_of(log.role)[entries] == SAVED]):
        if not is_within(cell.block, *blocks):
            totals[cell.place] = totals.get(cell.place, 0) + cell.n_bytes
    return totals


def with_size(place: str, size: int) -> str:
    """`layers.0 (2.0 MiB)`, `loss (train.py:41, 2.0 MiB)`"""
    return f"{place[:-1]}, {mib(size)})" if place.endswith(")") else f"{place} ({mib(size)})"


def outside_modules(at: Ledger) -> str:
    """A sentence on code outside of modules that holds much of `at`; empty if it holds less than LEAST_SHARE."""
    sizes = by_line(at)
    total = sum(sizes.values())
    if not total or total < LEAST_SHARE * at.total_bytes:
        return ""
    lines = listed([f"{mib(size)} in {line}" for line, size in sizes.items()])
    share = f"{total / at.total_bytes:.0%}".replace("%", " %")
    text = f"Code that no module below the model owns made {mib(total)} ({share}) of what is held then: {lines}."
    saved = sum(cell.n_bytes for cell in at.cells if cell.line and cell.role == "saved activation")
    if saved < LEAST_SHARE * total:
        return f"{text} A policy recomputes modules and cannot free them."
    return (
        f"{text} A policy recomputes modules only; torch.utils.checkpoint.checkpoint around this code would free the "
        f"{mib(saved)} that it saves for backward."
    )


def older_graphs(run: Measurement) -> str:
    """A sentence on graphs of earlier forwards of the step that are alive at the peak; empty if there are none."""
    log = run.allocations
    calls = [] if log is None else [i for i, block in enumerate(log.calls.block) if not log.blocks[block]]
    if log is None or len(calls) < 2:
        return ""
    entries = alive(log, peak_tick(log))
    entries = entries[(array_of(log.role)[entries] == SAVED) & ~np.isin(entries, _outputs(log, calls))]
    sizes, born = array_of(log.n_bytes)[entries], array_of(log.born)[entries]
    call_of = np.maximum(np.searchsorted(array_of(log.calls.first_tick)[calls], born, side="left") - 1, 0)
    inside = born <= array_of(log.calls.end_tick)[calls][call_of]  # what the loss saves comes after the call
    by_call = np.bincount(call_of[inside], sizes[inside], len(calls)).astype(int).tolist()
    graphs = [(call, size) for call, size in zip(calls, by_call) if size > LEAST_GRAPH * sum(by_call)]
    earlier = graphs[:-1]
    if not earlier:
        return ""
    lines = dict.fromkeys(log.lines[log.calls.line[call]] for call, _ in earlier if log.calls.line)
    where = listed([line for line in lines if line])
    which = "the earlier one holds" if len(earlier) == 1 else f"the {len(earlier)} earlier ones hold"
    made = f", made by the call of the model in {where}" if where else ""
    return (
        f"The graphs of {len(graphs)} forwards are alive at the peak: {which} {mib(sum(size for _, size in earlier))}"
        f"{made}. Backward frees the graph of its loss, unless retain_graph keeps it; losses in a list that wait for "
        "one backward keep all of theirs."
    )


def _outputs(log: Allocations, calls: list[int]) -> list[int]:
    """Entries that the calls return: a variable may keep them without a graph."""
    ends = np.cumsum(array_of(log.calls.n_inputs) + array_of(log.calls.n_outputs)).tolist()
    return [entry for i in calls for entry in log.calls.entries[ends[i] - log.calls.n_outputs[i] : ends[i]]]


def outside_policies(run: Measurement) -> list[str]:
    """Both sentences for the peak of `run`, as far as they apply."""
    sentences = [older_graphs(run), outside_modules(ledger(run)) if run.allocations is not None else ""]
    return [sentence for sentence in sentences if sentence]
