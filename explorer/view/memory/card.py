"""The memory of a card as a bar for each run, and the card's limit in a timeline of requested bytes.

`timeline.py` draws one step by itself; a card adds what torch's allocator makes of the step, so it has a file.

    | driver | allocated | stranded | free ................... |      the card's size
    | driver | allocated | reserved and free | refused request ////|/////
"""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go
from msgspec.structs import replace

from explorer.plan.card.allocator_options import parse_options
from explorer.plan.card.caching_allocator import segment_bytes
from explorer.plan.card.cards import capacity_bytes
from explorer.record.card import CardMemory
from explorer.record.measurement import Measurement
from explorer.view.drawing.axis import positions
from explorer.view.drawing.colours import ALLOCATOR, VERDICT_COLOURS
from explorer.view.drawing.figure import Chart, add_bars, bars, bold, byte_series, figure
from explorer.view.drawing.units import byte_axis, mib
from explorer.view.text.runs import card_name, headroom_text, operator_place

REFUSED = VERDICT_COLOURS["different"]
IN_REACH = 2.0
"""A limit up to so many times the height of a timeline is drawn in it, else named above it."""
ALLOCATED, STRANDED = "allocated", "stranded"
PARTS = {
    "driver and context": ("rgba(128, 128, 128, 0.6)", "."),
    ALLOCATED: (ALLOCATOR["allocated"], ""),
    STRANDED: (ALLOCATOR["reserved"], "/"),
    "free": ("rgba(128, 128, 128, 0.18)", ""),
    "refused segment": (REFUSED, "x"),
}
"""Colour and pattern of each part of a bar, from left to right."""


def card_chart(memories: Mapping[str, CardMemory]) -> Chart:
    """Chart of what the step of each run, by name, holds on its card, against the size of the card.

    A refused run is drawn at the moment of the refusal, up to the segment that it needs.
    """
    card = next(iter(memories.values())).card
    fig = figure("Does the step fit the card?", card_answer(memories), height=162 + 28 * len(memories))
    unit, unit_name = byte_axis(card.total_bytes)
    parts = [_parts(memory) for memory in memories.values()]
    for name, (colour, pattern) in PARTS.items():
        sizes = [part.get(name, 0) for part in parts]
        if any(sizes):
            series = byte_series(name, sizes, unit, colour, pattern)
            add_bars(fig, list(memories), replace(series, lengths=[length or None for length in series.lengths]))
    bars(fig, "")
    fig.update_xaxes(ticksuffix=f" {unit_name}")
    fig.add_vline(x=card.total_bytes / unit, line={"width": 2, "color": REFUSED})
    return Chart(
        name="memory on the card",
        figure=fig,
        alt=f"Bars of the memory of a card: allocated, stranded and free. {card_answer(memories)}.",
        rows=lambda: [
            {
                "run": name,
                "requested": mib(memory.requested_bytes),
                "allocated": mib(memory.allocated_bytes),
                "reserved": mib(memory.reserved_bytes),
                "stranded": mib(memory.stranded_bytes),
                "headroom": f"refused {mib(memory.refused.n_bytes)}" if memory.refused else headroom_text(memory),
            }
            for name, memory in memories.items()
        ],
    )


def cards_of(runs: Mapping[str, Measurement]) -> dict[str, CardMemory]:
    """What each run holds on its card, by name of the run; runs without a card are left out."""
    return {name: run.card for name, run in runs.items() if run.card is not None}


def card_answer(memories: Mapping[str, CardMemory]) -> str:
    """`B200: baseline 230.0 MiB reserved, 177.36 GiB left`, or the refused request of a run."""
    answers = []
    for name, memory in memories.items():
        answer = f"{name} {mib(memory.reserved_bytes)} reserved, {headroom_text(memory)} left"
        if memory.refused is not None:
            answer = f"{name} refused {mib(memory.refused.n_bytes)} in {operator_place(memory.refused)}"
        answers.append(answer)
    return f"{card_name(next(iter(memories.values())).card)}: {'; '.join(answers)}"


def _parts(memory: CardMemory) -> dict[str, int]:
    card, refused = memory.card, memory.refused
    parts = {"driver and context": card.total_bytes - capacity_bytes(card)}
    if refused is None:
        free = max(capacity_bytes(card) - memory.reserved_bytes, 0)
        return parts | {ALLOCATED: memory.allocated_bytes, STRANDED: memory.stranded_bytes, "free": free}
    segment = segment_bytes(parse_options(card.options).rounded(refused.n_bytes))
    return parts | {ALLOCATED: refused.allocated_bytes, STRANDED: refused.free_bytes, "refused segment": segment}


def add_card(chart: Chart, runs: Mapping[str, Measurement]) -> Chart:
    """Draws the limit of the runs' card into a timeline by events, and the moment of each refused request.

    `runs` by name; events are counted in the last run. Nothing is drawn for runs without a card. Returns `chart`.
    """
    drawn = list(runs.values())[-1]
    if drawn.card is None or drawn.allocations is None:
        return chart
    fig, card = chart.figure, drawn.card.card
    unit, _ = byte_axis(max(run.held_peak_bytes or 0 for run in runs.values()))
    limit, top = capacity_bytes(card) / unit, float(fig.layout.yaxis.range[1])
    label = f"{card_name(card)}: {mib(capacity_bytes(card))} can be reserved"
    if limit <= IN_REACH * top:
        fig.add_hline(y=limit, line={"width": 2, "color": REFUSED})
        fig.layout.yaxis.range = [0, max(top, 1.15 * limit)]
        _note(fig, label, x=1, xref="paper", xanchor="right", y=limit, yanchor="bottom")
    else:
        label = f"{label}, above this picture"
        _note(fig, label, x=1, xref="paper", xanchor="right", y=0.92, yref="paper", yanchor="top")
    for name, run in runs.items():
        if run.card is not None and run.card.refused is not None and run.allocations is not None:
            refused, n_ticks = run.card.refused, run.allocations.n_ticks
            x = float(positions(run, run.allocations, drawn, axis="tick")[min(refused.tick, n_ticks)])
            fig.add_vline(x=x, line={"width": 2, "dash": "dash", "color": REFUSED})
            words = bold(f"refused {mib(refused.n_bytes)}") + (f" of the {name}" if len(runs) > 1 else "")
            _note(fig, f"{words}\n{operator_place(refused)}", x=x, xanchor="left", y=0.35, yref="paper", xshift=3)
    return chart


def _note(fig: go.Figure, text: str, **place: object) -> None:
    """Words on a ground of the card's colour: they stand over curves of any colour, in both themes."""
    fig.add_annotation(
        text=text, showarrow=False, align="left", bgcolor=REFUSED, borderpad=2,
        font={"size": 12, "color": "white"}, **place,  # a contrast of 5.2:1
    )  # fmt: skip
