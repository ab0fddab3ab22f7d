"""Labels of the blocks in the drawing: bytes kept or freed, number of runs, gain of toggling, hazards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from functools import cached_property

from msgspec.structs import replace

from explorer.plan.names import above, nearest_around
from explorer.record.allocations import Ledger
from explorer.record.base import Record
from explorer.record.comparison import Comparison
from explorer.record.graph import Block, Hazard, ModelGraph, Trait
from explorer.record.measurement import MeasuredBlock, Measurement
from explorer.record.policy import Policy
from explorer.view.drawing.units import from_to, mib
from explorer.view.graph.nesting import Node, nest

TRAITS: dict[Trait, tuple[str, str]] = {
    "uses_rng": ("dice", "Draws random numbers (dropout): recomputing puts the generator back first."),
    "own_generator": ("dice", "Draws from a random generator of its own, which torch does not put back."),
    "python_rng": ("dice", "Draws from Python's random, which torch does not put back."),
    "numpy_rng": ("dice", "Draws from numpy's random generator, which torch does not put back."),
    "running_statistics": ("stats", "Keeps running statistics (BatchNorm), which forward moves."),
}
GRAVITY = ("error", "warning", "note")
SIGNS = {"dice": "⚄", "stats": "x̄", "shared": "⇄", "error": "✕", "warning": "!", "note": "i"}


class Badge(Record):
    """A sign on a block; `text` explains the sign."""

    sign: str
    severity: str
    text: str


class Label(Record):
    """Texts on a block beside its name."""

    bytes: str = ""
    note: str = ""
    badges: tuple[Badge, ...] = ()
    title: str = ""
    heat: float = 0.0
    """0 to 1: the bar behind the words of the box."""
    bar: str = ""
    """The figure of the bar as spoken text; empty if the bar shows the bytes that the block holds at a moment."""
    stage: int | None = None


class Facts(Record):
    """Known figures of the blocks of a model; None or empty if not measured."""

    graph: ModelGraph
    policy: Policy
    baseline: Measurement | None = None
    candidate: Measurement | None = None
    """The candidate run, if it ran under exactly this policy."""
    freed_bytes: Mapping[str, int] = {}
    """Predicted: how much less is saved if the block is recomputed."""
    prices: Mapping[str, str] = {}
    hazards: tuple[Hazard, ...] = ()
    alive: Ledger | None = None
    """Bytes that each block holds at the chosen moment, drawn as bars."""
    distances: Mapping[str, float] = {}
    """The furthest gradient of each block from the baseline's, drawn as bars if no moment is chosen."""

    @cached_property
    def recomputed_inside(self) -> dict[str, tuple[str, ...]]:
        """The outermost recomputed blocks below each kept block."""
        on, below = set(self.policy.blocks), defaultdict[str, list[str]](list)
        for fqn in self.policy.blocks:
            if _recomputed_with(fqn, on) is None:
                for holder in above(fqn):
                    below[holder].append(fqn)
        return {holder: tuple(fqns) for holder, fqns in below.items()}

    def cost_of(self, fqn: str) -> MeasuredBlock | None:
        """Cost of a block in the candidate run."""
        return self.candidate.by_fqn.get(fqn) if self.candidate is not None else None

    @cached_property
    def segment_of(self) -> dict[str, tuple[str, ...]]:
        """The blocks that are recomputed together with each block of a segment."""
        return {fqn: unit.blocks for unit in self.policy.units if len(unit.blocks) > 1 for fqn in unit.blocks}


def labels(facts: Facts, in_view: Collection[str] = ()) -> dict[str, Label]:
    """A label for every node of the drawing, or only for the nodes `in_view`."""
    nodes = nest(facts.graph)
    on = set(facts.policy.blocks)
    badges = _badges(facts, nodes)
    share = _shares(facts, nodes)
    return {id: _label(facts, nodes[id], on, badges, share.get(id, 0.0)) for id in in_view or nodes if id}


def _label(facts: Facts, node: Node, on: set[str], badges: dict[str, list[Badge]], heat: float) -> Label:
    block = facts.graph.by_fqn.get(node.id)
    if node.members:
        of_node = _of_members([_own_badges(facts, badges, fqn) for fqn in node.members])
    else:
        of_node = [] if block is None else _own_badges(facts, badges, node.id)
    return Label(
        bytes=_bytes(facts, node, block, on),
        note=_note(facts, node, on),
        badges=tuple(of_node),
        title=_title(facts, node, block),
        heat=heat,
        bar=_distance(facts, node) if facts.alive is None else "",
    )


def _bytes(facts: Facts, node: Node, block: Block | None, on: set[str]) -> str:
    """Saved bytes of a block, kept and then recomputed. A run of blocks has the bytes of each member, or their sum."""
    if node.members:
        return _of_run(facts, node.members, on)
    if block is not None and not block.n_calls and not node.children:
        return "never called"
    return _change(facts, node.id, on)


def _of_run(facts: Facts, members: tuple[str, ...], on: set[str]) -> str:
    each = {_change(facts, fqn, on) for fqn in members}
    if len(each) == 1:
        return f"{each.pop()} each"
    before = sum(_saved(facts, fqn) for fqn in members)
    touched = {*on, *facts.recomputed_inside}
    sizes = [
        _held(facts, fqn) if fqn in touched or _recomputed_with(fqn, on) else _saved(facts, fqn) for fqn in members
    ]
    after = None if None in sizes else sum(size or 0 for size in sizes)
    if after == before:
        return f"{mib(before)} in all"
    return f"{_arrow(before, after, measured=facts.candidate is not None)} in all"


def _held(facts: Facts, fqn: str) -> int | None:
    """Bytes that a recomputed block still keeps, alone, around or inside others: measured, else predicted."""
    if cost := facts.cost_of(fqn):
        return cost.saved_after_forward_bytes
    freed = [facts.freed_bytes.get(block) for block in facts.recomputed_inside.get(fqn, (fqn,))]
    return None if None in freed else max(_saved(facts, fqn) - sum(size or 0 for size in freed), 0)


def _arrow(saved: int, after: int | None, *, measured: bool) -> str:
    """`15.0 → 0.5 MiB`; `≈` marks a prediction, `?` unknown bytes."""
    if after is None:
        return f"{mib(saved)} → ?"
    return from_to(saved, after, " → " if measured else " → ≈ ")


def _change(facts: Facts, fqn: str, on: set[str]) -> str:
    saved, measured = _saved(facts, fqn), facts.cost_of(fqn) is not None
    if fqn not in on:
        outer = _recomputed_with(fqn, on)
        if outer is None and fqn not in facts.recomputed_inside:
            return mib(saved)
        if outer and not measured:
            return f"{mib(saved)} with {outer}"
    return _arrow(saved, _held(facts, fqn), measured=measured)


def _recomputed_with(fqn: str, on: set[str]) -> str | None:
    """The innermost recomputed block around `fqn`."""
    return nearest_around(fqn.rpartition(".")[0], on) or None


def _saved(facts: Facts, fqn: str) -> int:
    """Bytes that the block keeps without recompute: measured, else counted in the model's description."""
    cost = _kept_cost(facts, fqn)
    return cost.saved_after_forward_bytes if cost else facts.graph.by_fqn[fqn].saved_bytes


def _kept_cost(facts: Facts, fqn: str) -> MeasuredBlock | None:
    """Cost of a block with everything kept. None also for an opened run, whose figures belong to its policy."""
    if facts.baseline is None or facts.baseline.spec.policy.units:
        return None
    return facts.baseline.by_fqn.get(fqn)


def _note(facts: Facts, node: Node, on: set[str]) -> str:
    cost = facts.cost_of(node.id)
    notes = []
    if unit := facts.segment_of.get(node.id):
        notes.append(f"{unit.index(node.id) + 1} of {len(unit)} together")
    if cost and cost.n_recompute:
        notes.append(f"ran {cost.n_forward + cost.n_recompute}×")
    if not notes and node.toggles and node.id not in on:
        notes.append(facts.prices.get(node.id, ""))
    return ", ".join(notes)


def _title(facts: Facts, node: Node, block: Block | None) -> str:
    """The tooltip: every figure with its unit and origin."""
    if block is None:
        equal = f"{len(node.members)} equal blocks, {node.members[0]} to {node.members[-1]}"
        return "\n".join(filter(None, (equal, _distance(facts, node))))
    origin = facts.baseline.origin if facts.baseline and _kept_cost(facts, node.id) else "counted"
    lines = [
        f"{block.fqn} ({block.kind})",
        f"saved activations {mib(_saved(facts, node.id))} when kept ({origin})",
        f"output {mib(block.output_bytes)}, parameters {mib(block.parameter_bytes)} (counted)",
    ]
    if distance := _distance(facts, node):
        lines.append(distance)
    if cost := facts.cost_of(node.id):
        lines.append(f"ran {cost.n_forward}× in forward and {cost.n_recompute}× again for backward (counted)")
    if segment := facts.segment_of.get(node.id):
        lines.append(f"recomputed as one segment: {segment[0]} to {segment[-1]}")
    if block.shares_parameters_with:
        lines.append(f"shares parameters with {', '.join(block.shares_parameters_with)}")
    return "\n".join(lines)


def _own_badges(facts: Facts, badges: dict[str, list[Badge]], fqn: str) -> list[Badge]:
    return [*badges.get(fqn, ()), *_trait_badges(facts.graph.by_fqn[fqn])]


def _of_members(each: list[list[Badge]]) -> list[Badge]:
    """A badge per sign, the gravest first, with the number of members that carry the sign. No hazard is lost."""
    first: dict[str, Badge] = {}
    n_with = Counter[str]()
    for of_member in each:
        for badge in of_member:
            first.setdefault(badge.sign, badge)
        n_with.update({badge.sign for badge in of_member})
    return [
        Badge(sign=sign, severity=badge.severity, text=f"{n_with[sign]} of {len(each)} blocks: {badge.text}")
        for sign, badge in sorted(first.items(), key=lambda pair: GRAVITY.index(pair[1].severity))
    ]


def _trait_badges(block: Block) -> list[Badge]:
    """Badges for traits without a hazard, such as the dice of dropout, on the block with the trait."""
    badges = [Badge(sign=SIGNS[TRAITS[t][0]], severity="note", text=TRAITS[t][1]) for t in block.traits if t in TRAITS]
    if block.shares_parameters_with:
        badges.append(
            Badge(
                sign=SIGNS["shared"],
                severity="note",
                text=f"Shares parameters with {', '.join(block.shares_parameters_with)}.",
            )
        )
    return badges[:2]


def _badges(facts: Facts, nodes: dict[str, Node]) -> dict[str, list[Badge]]:
    """Badges of hazards on their blocks. An error or a warning stands on the containers too, which may be folded."""
    badges: dict[str, list[Badge]] = defaultdict(list)
    inside: dict[str, dict[str, Badge]] = defaultdict(dict)
    for hazard in facts.hazards:
        text = f"{hazard.sentence} {hazard.remedy}"
        badge = Badge(sign=SIGNS[hazard.severity], severity=hazard.severity, text=text)
        for fqn in hazard.blocks:
            badges[fqn].append(badge)
            around = nodes[fqn].parent if fqn in nodes and hazard.severity != "note" else None
            while around:
                if around not in hazard.blocks:
                    inside[around].setdefault(hazard.severity, replace(badge, text=f"Inside: {text}"))
                around = nodes[around].parent
    for fqn, by_severity in inside.items():
        badges[fqn] += by_severity.values()
    return badges


def distances_by_block(comparison: Comparison | None) -> dict[str, float]:
    """The largest relative distance of a gradient at or below each block; blocks whose gradients are equal are left
    out."""
    furthest: dict[str, float] = {}
    if comparison is None:
        return furthest
    for diff in comparison.gradients:
        if not diff.bitwise and diff.relative_norm:
            for block in above(diff.name):
                furthest[block] = max(furthest.get(block, 0.0), diff.relative_norm)
    return furthest


def _furthest(facts: Facts, node: Node) -> float:
    return max(facts.distances.get(fqn, 0.0) for fqn in node.members or (node.id,))


def _distance(facts: Facts, node: Node) -> str:
    """`gradients off by 0.31 (measured)`; empty if they are equal or not compared."""
    return f"gradients off by {distance:.2g} (measured)" if (distance := _furthest(facts, node)) else ""


def _shares(facts: Facts, nodes: dict[str, Node]) -> dict[str, float]:
    """Each node's figure, everything below included, relative to the largest: bytes alive, else distances."""
    sizes: dict[str, float] = {}
    if facts.alive is not None:
        for fqn, n_bytes in facts.alive.by_block.items():
            id: str | None = fqn if fqn in nodes else None
            while id:
                sizes[id] = sizes.get(id, 0) + n_bytes
                id = nodes[id].parent
    elif facts.distances:
        sizes = {node.id: _furthest(facts, node) for node in nodes.values()}
    largest = max(sizes.values(), default=0)
    return {id: size / largest for id, size in sizes.items()} if largest else {}
