"""Outcomes on disk: every bit comes back, nothing is held in memory, what is equal is there once."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from explorer.engine.compare import kept
from explorer.engine.compare.kept import Kept
from explorer.engine.state.bits import same_bits

TENSORS: dict[str, Tensor | None] = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "none": None,
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "half": torch.randn(5, dtype=torch.float16),
    "brain": torch.randn(2, 3, dtype=torch.bfloat16),
    "double": torch.randn(7, dtype=torch.float64),
    "complex": torch.randn(4, dtype=torch.complex64).conj(),
    "flags": torch.tensor([True, False]),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "sparse": torch.eye(3).to_sparse(),
}


def test_every_bit_comes_back() -> None:
    there = Kept(TENSORS.items())
    assert list(there) == list(TENSORS)
    for name in reversed(TENSORS):
        given, read = TENSORS[name], there[name]
        if given is None or read is None:
            assert given is read
        else:
            dense = given.to_dense() if given.layout is not torch.strided else given.resolve_conj()
            assert same_bits(dense, read), name


def test_what_is_kept_does_not_follow_the_tensor() -> None:
    tensor = torch.zeros(3)
    there = Kept([("a", tensor)])
    tensor.fill_(1)
    read = there["a"]
    assert read is not None and read.tolist() == [0, 0, 0]


def test_what_is_equal_is_written_once() -> None:
    first = Kept([("same", torch.ones(1000)), ("other", torch.ones(1000))])
    second = Kept([("same", torch.ones(1000)), ("other", torch.zeros(1000))], first)
    assert second._end == 4000
    for name, value in (("same", 1.0), ("other", 0.0)):
        read = second[name]
        assert read is not None and bool((read == value).all())


def test_a_full_disk_leaves_it_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.tempfile, "TemporaryFile", full)
    tensor = torch.zeros(3)
    there = Kept([("a", tensor)])
    tensor.fill_(1)
    read = there["a"]
    assert read is not None and read.tolist() == [0, 0, 0]


def test_a_copy_of_the_process_may_move_the_position_of_the_file() -> None:
    """A model that forks shares the position with its copy: reading and writing do not use it."""
    kept = Kept([("a", torch.arange(4.0))])
    place = kept._places["a"]
    os.lseek(place.file.open.fileno(), 7, os.SEEK_SET)
    again = Kept([("a", torch.arange(4.0)), ("b", torch.ones(3))], like=kept)
    assert torch.equal(kept["a"], torch.arange(4.0)) and torch.equal(again["b"], torch.ones(3))
    assert os.lseek(place.file.open.fileno(), 0, os.SEEK_CUR) == 7
