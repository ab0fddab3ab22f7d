"""Rows of saved tensors: which block saves which view of how many bytes, and when it is read and released."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from explorer.engine.watch.saved_tensors import SavedTensors
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import Tracker


@contextmanager
def watched(model: nn.Module) -> Iterator[SavedTensors]:
    with Tracker(model, torch.device("cpu")) as tracker:
        saved = SavedTensors(tracker)
        with saved.watching():
            yield saved


def views(made: Callable[[Tensor], object]) -> tuple[list[int], list[int]]:
    """Numbers of the views that autograd saves, and their bytes."""
    x = torch.ones(4, 4, requires_grad=True)
    with watched(nn.Identity()) as saved:
        kept = made(x * 1)
    assert kept is not None
    return [row[2] for row in saved._rows], [row[3] for row in saved._rows]


def test_a_row_has_the_innermost_block_and_the_times_of_the_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.Tanh()))
    with watched(model) as saved:
        loss = model(torch.ones(3, 4)).sum()
        unread = loss * loss
        del unread
        loss.backward()
    rows = saved._rows
    assert [(saved._tracker.fqns[block], n_bytes) for _, block, _, n_bytes, *_ in rows[:2]] == [("0", 48), ("1.0", 48)]
    assert all(saved_ns <= read_ns <= released_ns for *_, saved_ns, read_ns, released_ns in rows[:2])
    assert [(read_ns, released_ns > 0) for *_, read_ns, released_ns in rows[2:]] == [(NONE, True)] * 2, "never read"


def test_equal_views_share_a_number() -> None:
    assert views(lambda x: x * x) == ([0, 0], [64, 64])
    others: dict[str, Callable[[Tensor], object]] = {
        "offset": lambda x: [half.sin() for half in x.split(2)],
        "shape": lambda x: (x.sin(), x[:2].sin()),
        "stride": lambda x: (x.sin(), x.t().sin()),
        "version": lambda x: (x.sin(), x.add_(1).sin()),
        "storage": lambda x: (x.sin(), x.clone().sin()),
    }
    assert {name: views(made)[0] for name, made in others.items()} == dict.fromkeys(others, [0, 1])


def test_an_expanded_dimension_has_the_bytes_of_one_element() -> None:
    assert views(lambda x: x[:, :1].expand(4, 9).sin())[1] == [4 * 4]
    assert views(lambda x: x[:1, :1].expand(0, 9).sin())[1] == [0]
    assert views(lambda x: x.double().sin())[1] == [4 * 4 * 8]


def test_a_tensor_of_several_storages_has_no_row() -> None:
    with watched(nn.Identity()) as saved:
        sparse, dense = torch.eye(3).to_sparse(), torch.ones(3, 2, requires_grad=True) * 1
        n_bytes = [len(saved._tracker.storages.of(tensor)) for tensor in (sparse, dense)]
        torch.sparse.mm(sparse, dense).sum().backward()
    assert n_bytes[0] > 1 == n_bytes[1] and not saved._rows


@pytest.mark.parametrize("n_backwards", [1, 2])
def test_a_backward_that_runs_twice_leaves_no_rows(n_backwards: int) -> None:
    x = torch.ones(3, requires_grad=True)
    with watched(nn.Identity()) as saved:
        y = (x * 1).sin().sum()
        for _ in range(n_backwards):
            y.backward(retain_graph=True)
    n_storages = 1 + max(row[0] for row in saved._rows)
    assert bool(saved.record(np.array([1]), np.arange(n_storages)).entry) is (n_backwards == 1)


def test_an_event_at_the_time_of_a_row_comes_before_it_and_what_never_happens_after_the_step() -> None:
    saved = SavedTensors(Tracker(nn.Identity(), torch.device("cpu")))
    saved._rows = [[2, 5, 0, 48, 9, 10, 29], [1, 5, 1, 48, 9, 10, 29], [0, 6, 2, 16, 20, NONE, NONE]]
    saves = saved.record(np.array([10, 20, 30]), np.array([7, NONE, 3]))
    columns = {name: list(getattr(saves, name)) for name in saves.__struct_fields__}
    assert columns == {
        "entry": [3, 7], "block": [5, 6], "view": [0, 2], "n_bytes": [48, 16],
        "saved_tick": [0, 2], "read_tick": [1, 4], "released_tick": [2, 4],
    }  # fmt: skip


def test_hooks_step_aside_for_torch_func_and_come_back() -> None:
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    x = torch.ones(3, 2, requires_grad=True)
    with watched(nn.Identity()) as saved:
        inside = torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))(x)
        n_inside = len(saved._rows)
        known = x * 1
        kept = known.sin()
        saved._tracker.is_aside = True
        aside = known.cos()
    assert inside is not None and kept is not None and aside is not None
    assert len(saved._rows) == n_inside + 1 and torch.autograd.graph.disable_saved_tensors_hooks is disable
    outside = (x * 1).sin()
    assert outside.grad_fn is not None and len(saved._rows) == n_inside + 1
