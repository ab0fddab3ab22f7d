"""What a run leaves behind, kept on disk: tensors come back one by one, when somebody asks for one.

A comparison holds the outcomes of three runs and more, one of them in float64: in memory that was as much again as the
largest of the runs. What equals an earlier outcome is not written twice.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorer.engine.world.bits import dense, same_bits

DISK = Path("/var/tmp")
"""By custom on a disk, where /tmp may lie in memory; TMPDIR says otherwise."""


class _File:
    """A file without a name, which goes when the last tensor in it is forgotten."""

    def __init__(self) -> None:
        where = DISK if "TMPDIR" not in os.environ and os.access(DISK, os.W_OK) else None
        self.open: Any = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115

    def __del__(self) -> None:
        if hasattr(self, "open"):
            self.open.close()


@dataclass(frozen=True)
class _Place:
    file: _File
    offset: int
    n_bytes: int
    dtype: torch.dtype
    shape: torch.Size


class Kept(Mapping[str, Tensor | None]):
    """Tensors by name, each a detached copy on the CPU at every reading; None: the run has none under this name."""

    def __init__(
        self, tensors: Iterable[tuple[str, Tensor | None]], like: Mapping[str, Tensor | None] | None = None
    ) -> None:
        """What is equal bit by bit in `like` is taken from there."""
        self._file: _File | None = None
        self._end = 0
        self._places: dict[str, _Place | Tensor | None] = {}
        known = like or {}
        for name, tensor in tensors:
            self._places[name] = self._put(name, on_cpu(tensor), known)

    def __getitem__(self, name: str) -> Tensor | None:
        place = self._places[name]
        if not isinstance(place, _Place):
            return place
        if not place.n_bytes:
            return torch.empty(place.shape, dtype=place.dtype)
        file = place.file.open
        read = np.fromfile(file, dtype=np.uint8, count=place.n_bytes, offset=place.offset - file.tell())
        return torch.from_numpy(read).view(place.dtype).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _put(self, name: str, tensor: Tensor | None, known: Mapping[str, Tensor | None]) -> _Place | Tensor | None:
        if tensor is None:
            return None
        earlier = known.get(name)
        if isinstance(known, Kept) and earlier is not None and same_bits(earlier, tensor):
            return known._places[name]
        try:
            return self._write(tensor)
        except OSError:  # a full disk: memory may still have room, and says so itself where it has none
            return tensor.clone()

    def _write(self, tensor: Tensor) -> _Place:
        if self._file is None:
            self._file = _File()
        flat = as_bytes(tensor)
        place = _Place(self._file, self._end, flat.nbytes, tensor.dtype, tensor.shape)
        self._file.open.seek(self._end)
        flat.tofile(self._file.open)
        self._end += flat.nbytes
        return place


def on_cpu(tensor: Tensor | None) -> Tensor | None:
    """Dense and detached; the very memory of a dense tensor that is there already."""
    return None if tensor is None else dense(tensor)


def as_bytes(tensor: Tensor) -> Any:
    """A dense tensor's memory as numpy reads it."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
