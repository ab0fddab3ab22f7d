"""From operators to arrows: which block's data reaches which block, and where data of several places comes together.

An operator that a block with children runs itself is drawn only where it says something:

    relu(conv(x))        one source, inside the block         dissolved: the arrow leaves conv
    x + mlp(norm(x))     two sources                          a join: x and mlp lead into `+`
    q @ k, then @ v      a join that feeds one join only      one join of q, k and v
    relu(x)              one source, outside the block        kept: where the block is folded, the block did it
    arange(n)            no source, read within the block     left out
    x.float()            the model's input, made ready        dissolved: the arrow leaves the input, which lies in the
                                                              model itself
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from explorer.engine.watch.data_flow import ELSEWHERE, GIVEN, DataFlow, Place
from explorer.plan.names import above
from explorer.record.graph import Edge, Join

MOST_JOINS = 16
"""Limit for one block; where a loop makes more, those of one operator are one."""
ATTENTION = "scaled_dot_product"


def edges_and_joins(flow: DataFlow) -> tuple[tuple[Edge, ...], tuple[Join, ...]]:
    """What flows in one observed forward, calls of one block laid over each other."""
    merged = _Merged(flow)
    merged.settle()
    merged.thin_out()
    ids = _ids(merged.joins())
    edges = _edges(flow, merged, ids)
    joins = tuple(Join(id=ids[place], block=place.block, op=_word(place.op)) for place in merged.joins())
    return edges, joins


class _Merged:
    """Which place stands for which: `place_of` is the drawn one."""

    def __init__(self, flow: DataFlow) -> None:
        self.order = sorted(flow.first, key=flow.first.__getitem__)
        operating = {place.block for place in self.order}
        holders = {ancestor for block in operating for ancestor in above(block)}
        self._stands_for: dict[Place, Place] = {}
        for place in self.order:
            if place.op and place.block not in holders:  # no child of it computes anything: it is one box
                self._stands_for[place] = Place(place.block)
        self.hops = [(datum.writer, reader) for datum in flow.data for reader in datum.readers]

    def place_of(self, place: Place) -> Place:
        while place in self._stands_for:
            place = self._stands_for[place]
        return place

    def joins(self) -> list[Place]:
        """Places of blocks with children that stand for themselves."""
        return [place for place in self.order if place.op and place not in self._stands_for]

    def settle(self) -> None:
        """Dissolves and joins until nothing changes."""
        n_before = -1
        while n_before != len(self._stands_for):
            n_before = len(self._stands_for)
            self._dissolve()
            self._contract()

    def _neighbours(self, *, sources: bool) -> dict[Place, set[Place]]:
        neighbours: dict[Place, set[Place]] = defaultdict(set)
        for hop in self.hops:
            writer, reader = map(self.place_of, hop)
            if writer not in (reader, ELSEWHERE):
                neighbours[reader if sources else writer].add(writer if sources else reader)
        return neighbours

    def _dissolve(self) -> None:
        """What has one source within the block is that source's; what has equal sources is one join."""
        sources, readers = self._neighbours(sources=True), self._neighbours(sources=False)
        known: dict[tuple[str, frozenset[Place]], Place] = {}
        for place in self.joins():
            own = frozenset(map(self.place_of, sources[place])) - {place, ELSEWHERE}
            if len(own) == 1 and _lies_in(next(iter(own)), place.block):
                self._stands_for[place] = next(iter(own))
            elif not own and all(_lies_in(reader, place.block) for reader in readers[place]):
                self._stands_for[place] = ELSEWHERE
            elif (same := self.place_of(known.setdefault((place.block, own), place))) != place:
                self._stands_for[place] = same

    def _contract(self) -> None:
        """A join that feeds nothing but one other join of its block is a part of that."""
        readers = self._neighbours(sources=False)
        for place in self.joins():
            own = set(map(self.place_of, readers[place])) - {place}
            if len(own) == 1 and (only := own.pop()).op and only.block == place.block:
                self._stands_for[place] = only

    def thin_out(self) -> None:
        many = {block for block, n in Counter(place.block for place in self.joins()).items() if n > MOST_JOINS}
        first: dict[tuple[str, str], Place] = {}
        for place in self.joins():
            if place.block in many and (same := first.setdefault((place.block, place.op), place)) != place:
                self._stands_for[place] = same


def _edges(flow: DataFlow, merged: _Merged, ids: dict[Place, str]) -> tuple[Edge, ...]:
    """Tensors that go from one place to the same readers are one number, their bytes added up."""
    begun = {**flow.first, GIVEN: -1}
    for place in merged.order:
        begun.setdefault(merged.place_of(place), flow.first[place])  # of a block that its own operators stand for
    n_bytes: dict[tuple[Place, tuple[Place, ...]], Counter[Place]] = defaultdict(Counter)
    n_tensors: Counter[tuple[Place, tuple[Place, ...]]] = Counter()
    for datum in flow.data:
        source = merged.place_of(datum.writer)
        read: dict[Place, int] = {}
        for reader in datum.readers:
            target = merged.place_of(reader)
            if target != source and source != ELSEWHERE:
                read[target] = max(read.get(target, 0), datum.bytes_read(reader))
        if read:
            way = (source, tuple(read))
            n_tensors[way] += 1
            n_bytes[way].update(read)
    return tuple(
        Edge(
            source=ids.get(source, source.block),
            target=ids.get(target, target.block),
            n_bytes=n_bytes[source, targets][target],
            n_tensors=n,
            data=number,
            back=begun[target] <= begun[source],
        )
        for number, ((source, targets), n) in enumerate(n_tensors.items())
        for target in targets
    )


def _ids(joins: Iterable[Place]) -> dict[Place, str]:
    """`blocks.0:add`, and `blocks.0:add.2` for the second: a colon and an operator end no fqn."""
    ids: dict[Place, str] = {}
    n_named: Counter[str] = Counter()
    for place in joins:
        name = f"{place.block}:{_word(place.op)}"
        n_named[name] += 1
        ids[place] = name if n_named[name] == 1 else f"{name}.{n_named[name]}"
    return ids


def _word(op: str) -> str:
    """The operator as people know it."""
    return "attention" if ATTENTION in op else op.strip("_").removesuffix("_forward")


def _lies_in(place: Place, block: str) -> bool:
    if place == GIVEN:
        return not block
    return (place.block == block and bool(place.op)) or block in above(place.block)
