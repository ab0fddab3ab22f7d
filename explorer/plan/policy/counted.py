"""The units that presets count: blocks worth recomputing, and safe to recompute, judged by one observed forward.

A unit is a layer of the model's list of layers. A block with children is a unit too, if it saves at least a quarter of
the smallest layer. A block that saves more than half of the model, or that a hazard forbids, is replaced by the blocks
inside. Neighbouring single operations in a chain form one unit if they free bytes together.

A single operation counts only if it keeps more than its input and output: a convolution alone keeps its input, and so
would its checkpoint. Layers that LayerDrop left out of the observed forward count like other layers. A frozen body that
saves nothing does not count: its recompute would have no effect.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from explorer.plan.hazards.hazards import hazards
from explorer.plan.names import Fqns, is_within, lineage, nearest_around
from explorer.record.graph import Block, ModelGraph
from explorer.record.policy import Policy, Unit

_WORTH = 4
"""A block without children counts if at least this fraction (1/4) of its saved bytes is neither input nor output."""


def counted_units(graph: ModelGraph) -> tuple[Fqns, ...]:
    """The counted units in order of execution; each unit is one block or a segment."""
    units = list(_without_errors(graph, list(_units(graph, _candidates(graph)))))
    order = {fqn: place for place, fqn in enumerate(graph.chain)}
    for unit in _left_over(graph, units):
        place = order.get(unit[0], len(order))
        behind = (i for i, other in enumerate(units) if order.get(other[0], -1) > place)
        units.insert(next(behind, len(units)), unit)
    # A block that the model checkpoints itself saves in its second run.
    again = graph.checkpointed_by_itself
    idle = {fqn for fqn in graph.saves_nothing if not is_within(fqn, *again) and not _left_a_child_out(graph, fqn)}
    return tuple(unit for unit in units if not idle.issuperset(unit))


def segments(blocks: Sequence[str], graph: ModelGraph) -> tuple[Fqns, ...]:
    """About sqrt(n) stretches of equal length. None begins with a block that writes into its input: that is what a
    checkpoint keeps."""
    n_blocks, n_segments = len(blocks), round(math.sqrt(len(blocks)))
    borders = [round(i * n_blocks / n_segments) for i in range(n_segments)] if n_segments else []
    borders = [_first_that_keeps_its_input(blocks, border, graph) for border in borders]
    stretches = [tuple(blocks[first:end]) for first, end in zip(borders, [*borders[1:], n_blocks])]
    return tuple(segment for segment in stretches if segment)


def runs(units: Sequence[Fqns], graph: ModelGraph) -> list[list[Fqns]]:
    """`units` in stretches of neighbours: each hands on to the next, and nothing else happens in between.

    If the observed forward left out some layers of a list, none of them is joined: the next forward leaves out others.
    """
    skipped = _skipped_siblings(graph)
    stretches: list[list[Fqns]] = []
    for unit in units:
        before = stretches[-1][-1][-1] if stretches else None
        if before is not None and graph.next_in_turn.get(before) == unit[0] and unit[0] not in skipped:
            stretches[-1].append(unit)
        else:
            stretches.append([unit])
    return stretches


def _first_that_keeps_its_input(blocks: Sequence[str], at: int, graph: ModelGraph) -> int:
    while at < len(blocks) and "changes_inputs" in graph.by_fqn[blocks[at]].traits:
        at += 1
    return at


def _candidates(graph: ModelGraph) -> list[str]:
    """Repeated blocks of the chain and blocks of similar size, with the layers that were skipped."""
    repeated = frozenset(graph.repeats)
    saved = [graph.by_fqn[fqn].saved_bytes for fqn in repeated if graph.by_fqn[fqn].saved_bytes]
    least = min(saved, default=0) // 4 if len(repeated) < len(graph.chain) else 0
    skipped = _skipped_siblings(graph)
    candidates: dict[str, None] = {}
    for fqn in graph.chain:
        block = graph.by_fqn[fqn]
        inside = _skipped_inside(graph, block)
        if inside:
            candidates.update(dict.fromkeys(inside))
        elif fqn in repeated:
            candidates.update(dict.fromkeys(skipped.get(fqn, (fqn,))))
        elif block.n_calls and block.saved_bytes >= least:
            candidates[fqn] = None
    return list(candidates) if skipped else [part for fqn in candidates for part in _parts(graph, fqn)]


def _parts(graph: ModelGraph, fqn: str) -> list[str]:
    """The block itself; of one that saves more than half of the model the blocks in it, where those free something."""
    if not _is_body(graph, fqn):
        return [fqn]
    parts = [part for inner in _called_below(graph, fqn) for part in _parts(graph, inner)]
    return parts if any(_units(graph, parts)) else [fqn]


def _is_body(graph: ModelGraph, fqn: str) -> bool:
    """True if the block saves more than half of the model in one call."""
    block = graph.by_fqn[fqn]
    return block.n_calls == 1 and block.saved_bytes * 2 > graph.by_fqn[""].saved_bytes > 0


def _called_below(graph: ModelGraph, fqn: str) -> list[str]:
    """The nearest blocks below that are called: lists of modules never are."""
    called: list[str] = []
    for child in graph.children[fqn]:
        called += [child.fqn] if child.n_calls else _called_below(graph, child.fqn)
    return called


def _left_over(graph: ModelGraph, units: Sequence[Fqns]) -> list[Fqns]:
    """Neighbours that no unit holds, and that free as much together as a small unit: the stem of a ResNet, say."""
    named = {fqn for unit in units for fqn in unit}
    around = set(lineage(*named))
    least = min((_saved_bytes(graph, unit) for unit in units), default=0) // _WORTH
    following, stretches = graph.next_in_turn, list[Fqns]()
    free = [
        block.fqn for block in graph.blocks
        if block.n_calls and block.fqn not in around and named.isdisjoint(lineage(block.fqn)) and block.parent in around
    ]  # fmt: skip
    behind = {following[fqn] for fqn in free if fqn in following}
    for first in (fqn for fqn in free if fqn not in behind):
        stretch = [first]
        while following.get(stretch[-1]) in free:
            stretch.append(following[stretch[-1]])
        stretch = stretch[_first_that_keeps_its_input(stretch, 0, graph) :]
        if len(stretch) > 1 and _freed(graph, stretch) > least:
            stretches.append(tuple(stretch))
    return [unit for unit in stretches if unit not in in_error(graph, stretches)]


def _saved_bytes(graph: ModelGraph, fqns: Iterable[str]) -> int:
    return sum(graph.by_fqn[fqn].saved_bytes for fqn in fqns)


def _freed(graph: ModelGraph, stretch: Sequence[str]) -> int:
    """Bytes that a segment frees; 0 where that is less than a quarter of what it saves."""
    saved = _saved_bytes(graph, stretch)
    freed = saved - graph.by_fqn[stretch[-1]].output_bytes
    return freed if freed * _WORTH >= saved else 0


def _skipped_siblings(graph: ModelGraph) -> dict[str, Fqns]:
    """fqn -> all numbered layers of its kind beside it, where the observed forward left some of them out."""
    kin: dict[tuple[str, str], list[Block]] = defaultdict(list)
    for holder, blocks in graph.children.items():
        for block in blocks:
            if block.name.isdigit():
                kin[holder, block.kind].append(block)
    siblings: dict[str, Fqns] = {}
    for layers in kin.values():
        if _left_some_out(layers):
            fqns = tuple(layer.fqn for layer in layers)
            siblings |= dict.fromkeys(fqns, fqns)
    return siblings


def _left_some_out(layers: Iterable[Block]) -> bool:
    """True if the observed forward called some of the layers and left out others. Lists of modules do not count."""
    return {bool(layer.n_calls) for layer in layers if layer.parameter_bytes} == {True, False}


def _left_a_child_out(graph: ModelGraph, fqn: str) -> bool:
    """True if the block was called and part of it was not, as with stochastic depth: the next forward may need it."""
    return any(child.parameter_bytes and not child.n_calls for child in graph.children[fqn])


def _skipped_inside(graph: ModelGraph, block: Block) -> Fqns:
    """Layers of a list in this block of which some were left out, as another forward may not: it draws at random."""
    if not block.uses_rng:
        return ()
    for holder in graph.children[block.fqn]:
        layers = [child for child in graph.children[holder.fqn] if child.name.isdigit() and child.parameter_bytes]
        if len({layer.kind for layer in layers}) == 1 and _left_some_out(layers):
            return tuple(layer.fqn for layer in layers)
    return ()


def _units(graph: ModelGraph, candidates: list[str]) -> Iterator[Fqns]:
    done: set[str] = set()
    for fqn in candidates:
        parent = graph.by_fqn[fqn].parent
        if parent is not None and _is_chain_of_operators(graph, parent):
            if parent not in done:
                yield from _of_several(segments([block.fqn for block in graph.children[parent]], graph))
            done.add(parent)
        elif graph.children[fqn] or not graph.by_fqn[fqn].n_calls or _keeps_of_its_own(graph, fqn):
            yield (fqn,)


def _of_several(stretches: Iterable[Fqns]) -> Iterator[Fqns]:
    """A stretch of one operator is taken together with the next."""
    waiting: Fqns = ()
    done: list[Fqns] = []
    for stretch in stretches:
        waiting += stretch
        if len(waiting) > 1:
            done.append(waiting)
            waiting = ()
    if waiting and done:
        done[-1] += waiting
    yield from done


def _is_chain_of_operators(graph: ModelGraph, fqn: str) -> bool:
    block, children = graph.by_fqn[fqn], graph.children[fqn]
    whole = len(children) > 1 and not any(graph.children[child.fqn] for child in children)
    return whole and block.kind == "Sequential" and block.n_calls > 0


def _keeps_of_its_own(graph: ModelGraph, fqn: str) -> bool:
    block = graph.by_fqn[fqn]
    passing = block.output_bytes + sum(edge.n_bytes for edge in graph.edges if edge.target == fqn)
    return (block.saved_bytes - passing) * _WORTH >= block.saved_bytes > 0


def _without_errors(graph: ModelGraph, units: list[Fqns]) -> tuple[Fqns, ...]:
    """`units` with each forbidden unit replaced by the block around it, or by the blocks inside it."""
    bad = in_error(graph, units)
    kin = {(block.parent, block.kind) for unit in bad for block in map(graph.by_fqn.__getitem__, unit)}
    for unit in units:
        first = graph.by_fqn[unit[0]]
        if not first.n_calls and (first.parent, first.kind) in kin:
            bad.append(unit)
    if not bad:
        return tuple(units)
    good = [unit for unit in units if unit not in bad]
    around = dict.fromkeys(fqn for unit in bad if (fqn := _block_around(graph, unit, good)) is not None)
    wrong = in_error(graph, [(fqn,) for fqn in around])
    instead = {fqn for fqn in around if (fqn,) not in wrong and not _is_body(graph, fqn)}
    safe: dict[Fqns, None] = {}
    for unit in units:
        above = nearest_around(unit[0], instead)
        if above is not None:
            safe[above,] = None
        elif unit in good:
            safe[unit] = None
        else:
            safe.update(dict.fromkeys(_inside(graph, unit)))
    return tuple(safe) or tuple((fqn,) for fqn in around if (fqn,) not in wrong)


def _inside(graph: ModelGraph, unit: Fqns) -> list[Fqns]:
    """Units in a unit that a hazard forbids: blocks that none forbids, opened as far as need be."""
    inside = [inner for fqn in unit for inner in _called_below(graph, fqn)]
    parts, safe = list(_units(graph, inside)), list[Fqns]()
    bad = in_error(graph, parts)
    for part in parts:
        safe += _inside(graph, part) if part in bad else [part]
    return safe


def in_error(graph: ModelGraph, units: Iterable[Fqns]) -> list[Fqns]:
    named = list(units)
    fired = hazards(graph, Policy(units=tuple(Unit(blocks=unit) for unit in named)))
    at = {fqn for hazard in fired if hazard.severity == "error" for fqn in hazard.blocks}
    wrong = set(lineage(*at))
    return [unit for unit in named if not wrong.isdisjoint(unit)]


def _block_around(graph: ModelGraph, unit: Fqns, good: list[Fqns]) -> str | None:
    """The nearest block above that is called and holds no unit that is good as it is; not the model itself."""
    for fqn in list(lineage(unit[0]))[1:-1]:
        if graph.by_fqn[fqn].n_calls:
            return None if any(is_within(other[0], fqn) for other in good) else fqn
    return None


def offloading(graph: ModelGraph) -> list[Unit]:
    """Units that offload a block."""
    return [Unit(blocks=blocks, action="offload") for blocks in counted_units(graph) if len(blocks) == 1]
