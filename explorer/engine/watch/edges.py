"""Edges of the block graph: from the writer of each storage to its readers, with joins of data from several places.

Data is followed by storage: a view has the writer of its base, and an in-place operator becomes the new writer. In a
block with children that computes something itself (a residual addition), each operator is a separate place. How such
an operator is drawn depends on its sources:

    relu(conv(x))        one source, inside the block         dissolved: the arrow leaves conv
    x + mlp(norm(x))     two sources                          a join: x and mlp lead into `+`
    q @ k, then @ v      a join that feeds one join only      one join of q, k and v
    relu(x)              one source, outside the block        kept: where the block is folded, the block did it
    arange(n)            no source, read within the block     left out
    x.float()            the model's input, made ready        dissolved: the arrow leaves the input, which lies in the
                                                              model itself
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from explorer.engine.watch.forward import dense
from explorer.plan.names import above
from explorer.record.graph import INPUT, Edge, Join

MOST_JOINS = 16
"""Limit for one block; above the limit, as in a loop, all joins of one operator become one."""
ATTENTION = "scaled_dot_product"


class Place(NamedTuple):
    """A writer or reader of data: a block without children, or one operator of a block with children."""

    block: str
    op: str = ""
    nth: int = 0
    """Number of the operator among operators of its name, from the beginning of the block's call."""


GIVEN = Place(INPUT)
"""Writer of the model's arguments."""
ELSEWHERE = Place("<elsewhere>")
"""Writer of older data: tensors that are plain attributes, constants made from Python numbers."""


@dataclass
class Datum:
    """One storage on its way from its writer to its readers."""

    writer: Place
    born: int
    n_bytes: int
    last_read: int | None = None
    """None if no operator reads the storage."""
    readers: dict[Place, dict[tuple[int, int], int]] = field(default_factory=dict)
    """Views that each reader read: bytes by offset and number of elements."""

    def bytes_read(self, reader: Place) -> int:
        """Bytes that a reader read: views of different parts add up, two shapes of one part do not."""
        return min(sum(self.readers[reader].values()), self.n_bytes)


class DataFlow:
    """Data flow of a forward, filled operator by operator; `now` numbers them. `constants` are not followed."""

    def __init__(self, constants: Iterable[Tensor]) -> None:
        self.data: list[Datum] = []
        self.now = 0
        self.constant = {tensor.untyped_storage()._cdata for tensor in constants if dense(tensor)}
        """Parameters and buffers, by storage."""
        self.first: dict[Place, int] = {}
        """Number of the operator with which each place began."""
        self._live: dict[int, tuple[weakref.ref[object], Datum]] = {}

    def add_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Adds the model's arguments; an argument that an earlier call made keeps its writer."""
        for tensor in tensors:
            if dense(tensor) and self._datum_of(tensor) is None:
                self._born(GIVEN, tensor.untyped_storage())

    def reads(self, place: Place, tensor: Tensor, *, shape_only: bool = False) -> None:
        """Notes that `place` reads `tensor`, or only its shape if `shape_only`."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.constant:
            return
        datum = self._datum_of(tensor)
        if datum is None:
            datum = self._born(ELSEWHERE, storage)
        datum.last_read = self.now
        if not shape_only:
            self.first.setdefault(place, self.now)
            datum.readers.setdefault(place, {})[int(tensor.storage_offset()), tensor.numel()] = tensor.nbytes

    def writes(self, place: Place, written: list[Tensor], made: set[int], *, mutable: bool) -> None:
        """Notes that an operator at `place` returned `written`; `made` are the addresses of its new storages.

        `mutable` is True if the operator may change its arguments in place.
        """
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata in self.constant:
                continue
            datum = self._datum_of(tensor)
            if storage._cdata in made or datum is None or (mutable and datum.writer != place):
                self._born(place, storage)

    def handed_on(self, fqn: str, tensors: list[Tensor]) -> None:
        """Adds a leaf that returns its input or a view of the input (Identity, Flatten) to the flow."""
        for tensor in tensors:
            datum = self._datum_of(tensor)
            if datum is not None and datum.writer != Place(fqn):
                self.reads(Place(fqn), tensor)
                self._born(Place(fqn), tensor.untyped_storage())
                self.now += 1

    def _datum_of(self, tensor: Tensor) -> Datum | None:
        reference, datum = self._live.get(tensor.untyped_storage()._cdata, (None, None))
        return datum if reference is not None and reference() is not None else None

    def _born(self, writer: Place, storage: Any) -> Datum:
        self.first.setdefault(writer, self.now)
        datum = Datum(writer, self.now, storage.nbytes())
        self.data.append(datum)
        self._live[storage._cdata] = (weakref.ref(storage), datum)
        return datum


def edges_and_joins(flow: DataFlow) -> tuple[tuple[Edge, ...], tuple[Join, ...]]:
    """Edges and joins of one observed forward; calls of one block are merged."""
    merged = _Merged(flow)
    merged.settle()
    merged.thin_out()
    ids = _ids(merged.joins())
    edges = _edges(flow, merged, ids)
    joins = tuple(Join(id=ids[place], block=place.block, op=_word(place.op)) for place in merged.joins())
    return edges, joins


class _Merged:
    """The places merged into drawn places: `place_of` returns the drawn place."""

    def __init__(self, flow: DataFlow) -> None:
        self.order = sorted(flow.first, key=flow.first.__getitem__)
        operating = {place.block for place in self.order}
        holders = set(above(*operating))
        self._stands_for: dict[Place, Place] = {}
        for place in self.order:
            if place.op and place.block not in holders:  # no child computes anything: the block is one box
                self._stands_for[place] = Place(place.block)
        self.hops = [(datum.writer, reader) for datum in flow.data for reader in datum.readers]

    def place_of(self, place: Place) -> Place:
        while place in self._stands_for:
            place = self._stands_for[place]
        return place

    def joins(self) -> list[Place]:
        """Operators of blocks with children that are drawn."""
        return [place for place in self.order if place.op and place not in self._stands_for]

    def settle(self) -> None:
        """Dissolves and contracts joins until nothing changes."""
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
        """Merges an operator with one source inside the block into the source, and operators of equal sources."""
        sources, readers = self._neighbours(sources=True), self._neighbours(sources=False)
        equal: dict[tuple[str, frozenset[Place]], Place] = {}
        for place in self.joins():
            origins = frozenset(map(self.place_of, sources[place])) - {place, ELSEWHERE}
            if len(origins) == 1 and _lies_in(next(iter(origins)), place.block):
                self._stands_for[place] = next(iter(origins))
            elif not origins and all(_lies_in(reader, place.block) for reader in readers[place]):
                self._stands_for[place] = ELSEWHERE
            elif (same := self.place_of(equal.setdefault((place.block, origins), place))) != place:
                self._stands_for[place] = same

    def _contract(self) -> None:
        """Merges a join into another join of its block if the join feeds only this other join."""
        readers = self._neighbours(sources=False)
        for place in self.joins():
            targets = set(map(self.place_of, readers[place])) - {place}
            if len(targets) == 1 and (only := targets.pop()).op and only.block == place.block:
                self._stands_for[place] = only

    def thin_out(self) -> None:
        many = {block for block, n in Counter(place.block for place in self.joins()).items() if n > MOST_JOINS}
        first: dict[tuple[str, str], Place] = {}
        for place in self.joins():
            if place.block in many and (same := first.setdefault((place.block, place.op), place)) != place:
                self._stands_for[place] = same


def _edges(flow: DataFlow, merged: _Merged, ids: dict[Place, str]) -> tuple[Edge, ...]:
    """The edges. Tensors from one place to the same readers share one data number, and their bytes add up."""
    begun = {**flow.first, GIVEN: -1}
    for place in merged.order:
        begun.setdefault(merged.place_of(place), flow.first[place])  # a block merged from its operators
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
    """Ids of the joins: `blocks.0:add`, then `blocks.0:add.2`. No fqn ends with a colon and an operator."""
    ids: dict[Place, str] = {}
    n_named: Counter[str] = Counter()
    for place in joins:
        name = f"{place.block}:{_word(place.op)}"
        n_named[name] += 1
        ids[place] = name if n_named[name] == 1 else f"{name}.{n_named[name]}"
    return ids


def _word(op: str) -> str:
    """The common name of an operator."""
    return "attention" if ATTENTION in op else op.strip("_").removesuffix("_forward")


def _lies_in(place: Place, block: str) -> bool:
    if place == GIVEN:
        return not block
    return (place.block == block and bool(place.op)) or block in above(place.block)
