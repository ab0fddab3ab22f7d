"""A quantity drawn as a bar on every block; a bar's length is the share of the largest figure at its depth.

Length is readable without colour. The block's tooltip and its spoken name have the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from explorer.record.base import Record
from explorer.record.comparison import Comparison
from explorer.record.measurement import MeasuredBlock, Measurement
from explorer.view.drawing.units import flops, mib
from explorer.view.graph.nesting import Node

NOTHING = "nothing"


class Overlay(Record):
    """The quantity drawn on the blocks."""

    what: str
    figures: Mapping[str, float]
    """Figures by fqn, everything below a block included; blocks without a figure are left out."""
    origin: str
    unit: str

    def in_words(self, figure: float) -> str:
        """With its unit."""
        if self.unit == "bytes":
            return mib(figure)
        if self.unit == "FLOP":
            return flops(round(figure))
        return f"{figure:.3g} {self.unit}".strip()

    def spoken(self, node: Node) -> str:
        """`saved bytes 15.0 MiB (measured)`, of several blocks the largest; empty if unknown."""
        numbers = [self.figures[fqn] for fqn in _blocks(node) if fqn in self.figures]
        if not numbers:
            return ""
        most = "at most " if len(set(numbers)) > 1 else ""
        return f"{self.what} {most}{self.in_words(max(numbers))}{' each' if len(numbers) > 1 else ''} ({self.origin})"

    @property
    def legend(self) -> str:
        """A sentence on the meaning of a full bar."""
        positive = {fqn: figure for fqn, figure in self.figures.items() if fqn and figure > 0}
        if not positive:
            return f"No block has any {self.what} yet: {NEEDS[self.what]}."
        most = max(positive, key=lambda fqn: (positive[fqn], -fqn.count(".")))
        return (
            f"Bars: {self.what}, {self.origin}. Full: the most at that depth; {most}: {self.in_words(positive[most])}."
        )


OF_RUN: dict[str, tuple[Callable[[MeasuredBlock], float | None], str, str]] = {
    "saved bytes": (lambda cost: cost.saved_after_forward_bytes, "bytes", "measured"),
    "forward FLOPs": (lambda cost: cost.forward_flops, "FLOP", "counted"),
    "forward time": (lambda cost: cost.forward.median_ms, "ms", "measured"),
}
PRICE, DISTANCE = "marginal price", "gradient distance"
QUANTITIES = (NOTHING, *OF_RUN, PRICE, DISTANCE)
NEEDS = {
    **dict.fromkeys(OF_RUN, "Run measures it"),
    PRICE: "a whole run of the baseline predicts it",
    DISTANCE: "a comparison whose gradients differ has it, bitwise equal ones are at no distance",
}


def of_run(what: str, run: Measurement | None) -> Overlay:
    """Overlay of a run's figure of each block; empty without a complete run."""
    read, unit, origin = OF_RUN[what]
    blocks = run.blocks if run is not None and run.complete else ()
    figures = {cost.fqn: figure for cost in blocks if (figure := read(cost)) is not None}
    if run is not None and (origin == "measured" or run.origin == "predicted"):
        origin = run.origin
    return Overlay(what=what, figures=figures, unit=unit, origin=origin)


def of_prices(mib_per_percent: Mapping[str, float]) -> Overlay:
    """Overlay of the memory that toggling each block buys."""
    return Overlay(what=PRICE, figures=mib_per_percent, unit="MiB of peak for 1 % of the FLOPs", origin="predicted")


def of_gradients(comparison: Comparison | None) -> Overlay:
    """The largest relative distance of a gradient at or below each block."""
    furthest: dict[str, float] = {}
    for diff in comparison.gradients if comparison is not None else ():
        distance = 0.0 if diff.bitwise else diff.relative_norm or 0.0
        block = diff.name.rpartition(".")[0]
        while True:
            furthest[block] = max(furthest.get(block, 0.0), distance)
            if not block:
                break
            block = block.rpartition(".")[0]
    return Overlay(what=DISTANCE, figures=furthest, unit="", origin="relative to the baseline, measured")


def shares(overlay: Overlay, nodes: Mapping[str, Node]) -> dict[str, float]:
    """Share of each node, 0 to 1; a node for several blocks shows their largest share."""
    by_node = {id: _figure(overlay, node) for id, node in nodes.items() if id}
    most: dict[int, float] = {}
    for id, figure in by_node.items():
        most[id.count(".")] = max(most.get(id.count("."), 0.0), figure)
    return {id: figure / most[id.count(".")] for id, figure in by_node.items() if figure > 0}


def _figure(overlay: Overlay, node: Node) -> float:
    return max((overlay.figures.get(fqn, 0.0) for fqn in _blocks(node)), default=0.0)


def _blocks(node: Node) -> tuple[str, ...]:
    return node.members or (node.id,)
