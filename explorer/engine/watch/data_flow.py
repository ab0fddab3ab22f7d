"""Writer and readers of each storage, with times: the edges between blocks, and the data that crosses a cut.

Data is followed by storage: a view has the writer of its base, and an in-place operator becomes the new writer. In a
block with children that computes something itself (a residual addition), each operator is a separate place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined]

from explorer.record.graph import INPUT


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
        self._live: dict[int, tuple[weakref.ref[Any], Datum]] = {}

    def given(self, tensors: Iterable[Tensor]) -> None:
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

    def writes(self, place: Place, written: list[Tensor], read: set[int], *, mutable: bool) -> None:
        """Notes that an operator at `place` returned `written`; `read` are the storages of its arguments.

        `mutable` is True if the operator may change its arguments in place.
        """
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata in self.constant:
                continue
            if storage._cdata not in read or self._datum_of(tensor) is None:
                self._born(place, storage)
            elif mutable:
                datum = self._datum_of(tensor)
                if datum is not None and datum.writer != place:
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
        held = self._live.get(tensor.untyped_storage()._cdata)
        return held[1] if held is not None and held[0]() is not None else None

    def _born(self, writer: Place, storage: Any) -> Datum:
        self.first.setdefault(writer, self.now)
        datum = Datum(writer, self.now, storage.nbytes())
        self.data.append(datum)
        self._live[storage._cdata] = (weakref.ref(storage), datum)
        return datum


def dense(tensor: Tensor) -> bool:
    """Whether one storage is behind `tensor`: a sparse tensor has several, a tensor in `torch.func` is a wrapper."""
    return tensor.layout == torch.strided and not _functorch.is_functorch_wrapped_tensor(tensor)
