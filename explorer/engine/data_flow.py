"""Who wrote each storage, who read it and when: the edges between blocks, and what crosses a cut.

Data is followed by storage, so a view carries on its base's writer and an operator in place becomes the new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

INPUT = "<input>"
"""Writer of what the model was given."""


@dataclass
class Datum:
    """One storage on its way from its writer to its readers."""

    writer: str
    born: int
    n_bytes: int
    last_read: int = -1
    readers: dict[str, int] = field(default_factory=dict)
    """Bytes by reading block."""


class DataFlow:
    """Filled operator by operator; `now` is the number of the one that runs. `constants` are not followed."""

    def __init__(self, constants: Iterable[Tensor]) -> None:
        self.data: list[Datum] = []
        self.now = 0
        self.constant = {tensor.untyped_storage()._cdata for tensor in constants if dense(tensor)}
        """Parameters and buffers, by storage."""
        self._live: dict[int, tuple[weakref.ref[Any], Datum]] = {}

    def reads(self, block: str, tensor: Tensor) -> None:
        """`block` reads; what nobody wrote was given to the model."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.constant:
            return
        datum = self._datum_of(tensor)
        if datum is None:
            datum = self._born(INPUT, storage)
        datum.last_read = self.now
        datum.readers[block] = max(datum.readers.get(block, 0), min(tensor.nbytes, datum.n_bytes))

    def writes(self, block: str, written: list[Tensor], read: set[int], *, mutable: bool) -> None:
        """An operator of `block` returned `written`; `read` are the storages of its arguments.

        `mutable`: it may have changed them in place.
        """
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata in self.constant:
                continue
            if storage._cdata not in read or self._datum_of(tensor) is None:
                self._born(block, storage)
            elif mutable:
                datum = self._datum_of(tensor)
                if datum is not None and datum.writer != block:
                    self._born(block, storage)

    def handed_on(self, fqn: str, tensors: list[Tensor]) -> None:
        """A leaf that returns its input or a view of it (Identity, Flatten) still stands in the flow."""
        for tensor in tensors:
            datum = self._datum_of(tensor)
            if datum is not None and datum.writer not in (fqn, INPUT):
                self.reads(fqn, tensor)
                self._born(fqn, tensor.untyped_storage())
                self.now += 1

    def _datum_of(self, tensor: Tensor) -> Datum | None:
        held = self._live.get(tensor.untyped_storage()._cdata)
        return held[1] if held is not None and held[0]() is not None else None

    def _born(self, writer: str, storage: Any) -> Datum:
        datum = Datum(writer, self.now, storage.nbytes())
        self.data.append(datum)
        self._live[storage._cdata] = (weakref.ref(storage), datum)
        return datum


def dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided
