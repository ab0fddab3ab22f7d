"""Keeps the tensors of an outcome on disk and reads them one by one.

A comparison holds the outcomes of three or more runs, one of them in float64: in memory, the outcomes were as large as
the largest run. A tensor that equals the tensor of an earlier outcome is not written twice.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorer.engine.state.bits import dense, same_bits

DISK = Path("/var/tmp")
"""Default folder, on a disk by custom while /tmp may lie in memory; TMPDIR overrides it."""


class _File:
    """A file without a name, which is deleted with the last reference to a tensor in it."""

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
    """Tensors by name; every read returns a detached copy on the CPU. None if the run has no tensor of the name."""

    def __init__(
        self, tensors: Iterable[tuple[str, Tensor | None]], like: Mapping[str, Tensor | None] | None = None
    ) -> None:
        """Writes `tensors`, except tensors that equal those of `like` bit by bit: both share one place on disk."""
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
        read = np.empty(place.n_bytes, dtype=np.uint8)
        _transfer(os.preadv, place.file, read, place.offset)
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
        except OSError:  # a full disk: memory may still have room
            return tensor.clone()

    def _write(self, tensor: Tensor) -> _Place:
        if self._file is None:
            self._file = _File()
        flat = as_bytes(tensor)
        place = _Place(self._file, self._end, flat.nbytes, tensor.dtype, tensor.shape)
        _transfer(os.pwritev, self._file, flat, self._end)
        self._end += flat.nbytes
        return place


def _transfer(call: Callable[..., int], file: _File, array: Any, offset: int) -> None:
    """Reads or writes all of `array` at `offset`: a model that forks shares the file's position with its copy."""
    rest, fd = memoryview(array), file.open.fileno()
    while rest.nbytes:
        n_bytes = call(fd, [rest], offset)
        if not n_bytes:
            raise OSError("A file of kept tensors ended before the last one.")
        rest, offset = rest[n_bytes:], offset + n_bytes


def on_cpu(tensor: Tensor | None) -> Tensor | None:
    """The tensor dense, detached and on the CPU. A dense CPU tensor shares its memory with the result."""
    return None if tensor is None else dense(tensor)


def as_bytes(tensor: Tensor) -> Any:
    """The bytes of a dense tensor as a numpy array."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
