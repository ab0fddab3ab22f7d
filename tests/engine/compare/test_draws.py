"""Draws of forward and recompute are paired call by call, whatever the order in which backward runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from explorer.engine.compare.draws import DrawWatch
from explorer.engine.policy.apply import apply_policy
from explorer.record.comparison import MaskDiff
from explorer.record.policy import Policy


def watched(model: nn.Module, policy: Policy, x: Tensor) -> dict[str, MaskDiff]:
    torch.manual_seed(0)
    watch = DrawWatch(model, policy)
    with apply_policy(model, policy), watch:
        model(x).sum().backward()
    return {mask.block: mask for mask in watch.masks}


def chain(n: int, draw: Callable[[], nn.Module] = lambda: nn.Dropout(0.4)) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), draw(), nn.Tanh()) for _ in range(n)))


class Repeat(nn.Module):
    """Calls one cell several times, so that its recomputes come in reverse order of its forwards."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.cell = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh())
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.n):
            x = self.cell(x)
        return x


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("blocks", [["0", "1", "2"], [("0", "1"), "2"], [("0", "1", "2")], ["0", "0.1", "2"]])
def test_every_draw_is_found_again(blocks: list[Any]) -> None:
    masks = watched(chain(3), Policy.recompute(blocks), X)
    named = {fqn for entry in blocks for fqn in ([entry] if isinstance(entry, str) else entry)}
    assert set(masks) == {f"{fqn}.1" for fqn in named if "." not in fqn}
    assert all(mask.n_elements and mask.n_elements % 30 == 0 for mask in masks.values())
    assert all((mask.n_mismatched, mask.n_not_drawn_again, mask.is_mask) == (0, 0, True) for mask in masks.values())


@pytest.mark.parametrize("blocks", [["0", "1", "2"], [("0", "1"), "2"]])
def test_without_the_stash_masks_differ_in_every_unit(blocks: list[Any]) -> None:
    masks = watched(chain(3), Policy.recompute(blocks, preserve_rng_state=False), X)
    assert all(mask.n_mismatched > 0 for mask in masks.values()) and len(masks) == 3


def test_a_cell_called_many_times_pairs_last_with_first() -> None:
    """In forward order two of the three calls would look mismatched."""
    assert watched(Repeat(3), Policy.recompute(["cell"]), X)["cell.1"] == MaskDiff(
        block="cell.1", n_elements=90, n_mismatched=0
    )


def test_what_is_kept_is_not_listed() -> None:
    assert set(watched(chain(3), Policy.recompute(["1"]), X)) == {"1.1"}
    assert watched(chain(2), Policy(), X) == {}


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.randn_like(x)


def test_other_random_numbers_are_told_from_masks() -> None:
    masks = watched(chain(1, Noisy), Policy.recompute(["0"], preserve_rng_state=False), X)
    assert (masks["0.1"].is_mask, masks["0.1"].mismatch_share) == (False, 1.0)


class FusedAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = x[None, None]
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout)[0, 0]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_counts_as_random_only_with_dropout(dropout: float) -> None:
    masks = watched(chain(1, lambda: FusedAttention(dropout)), Policy.recompute(["0"]), X)
    assert set(masks) == ({"0.1"} if dropout else set())


def test_draws_that_early_stop_leaves_out_are_counted() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Noise())
    masks = watched(nn.Sequential(model, nn.Linear(6, 6)), Policy.recompute(["0"]), X)
    assert (masks["0.2"].n_elements, masks["0.2"].n_not_drawn_again) == (0, 30)


class Noise(nn.Module):
    """Adds noise that backward does not need."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_hooks_are_gone_afterwards() -> None:
    model = chain(2)
    watched(model, Policy.recompute(["0"]), X)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
