"""What a watched step shows: draws of forward and recompute, state that moves again, where two forwards part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from explorer.engine.compare import watched as watched_step
from explorer.engine.compare.watched import Forwards, RerunDraws, RerunWatch, StateAudit, forward_difference
from explorer.engine.policy.apply import apply_policy
from explorer.record.comparison import ForwardDiff, MaskDiff
from explorer.record.policy import Policy
from tests.engine.trap_nets import Applied


def watched(model: nn.Module, policy: Policy, x: Tensor) -> dict[str, MaskDiff]:
    torch.manual_seed(0)
    watch = RerunWatch(model, policy)
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


def test_calls_pair_last_with_first_and_what_is_kept_is_not_listed() -> None:
    """In forward order two of the three calls of a cell would look mismatched."""
    model = Repeat(3)
    assert watched(model, Policy.recompute(["cell"]), X)["cell.1"] == MaskDiff(
        block="cell.1", n_elements=90, n_mismatched=0
    )
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert set(watched(chain(3), Policy.recompute(["1"]), X)) == {"1.1"}
    assert watched(chain(2), Policy(), X) == {}


def test_other_random_numbers_are_told_from_masks() -> None:
    masks = watched(
        chain(1, lambda: Applied(lambda x: x * torch.randn_like(x))),
        Policy.recompute(["0"], preserve_rng_state=False),
        X,
    )
    assert (masks["0.1"].is_mask, masks["0.1"].mismatch_share) == (False, 1.0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_counts_as_random_only_with_dropout(dropout: float) -> None:
    def attend(x: Tensor) -> Tensor:
        heads = x[None, None]
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)[0, 0]

    masks = watched(chain(1, lambda: Applied(attend)), Policy.recompute(["0"]), X)
    assert set(masks) == ({"0.1"} if dropout else set())


def test_draws_that_early_stop_leaves_out_are_counted() -> None:
    """Backward does not need the noise."""
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Applied(lambda x: x + torch.rand_like(x)))
    masks = watched(nn.Sequential(block, nn.Linear(6, 6)), Policy.recompute(["0"]), X)
    assert (masks["0.2"].n_elements, masks["0.2"].n_not_drawn_again) == (0, 30)


@pytest.mark.parametrize(("preserve", "others"), [(True, {}), (False, {"layer.1": 1})])
def test_a_mask_that_a_models_own_checkpoint_draws_again_is_named(preserve: bool, others: dict[str, int]) -> None:
    model = nn.Sequential()
    layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    model.add_module("layer", layer)
    options = {"use_reentrant": False, "preserve_rng_state": preserve, "early_stop": False}
    model.forward = lambda x: checkpoint(layer, x, **options)  # type: ignore[method-assign]
    with RerunDraws(model) as draws:
        model(torch.randn(64, 64)).sum().backward()
    assert (draws.n_drawn, dict(draws.others)) == (1, others)


def parted(change: Any, *, n_calls: int = 1) -> ForwardDiff:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.0)), nn.Linear(4, 2))
    other = copy.deepcopy(one)
    change(other)
    sides = [Forwards(one), Forwards(other)]
    x = torch.randn(3, 4)
    for side, times in zip(sides, (1, n_calls)):
        with side.watching():
            for _ in range(times):
                side.model(x).sum().backward()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in (*one.modules(), *other.modules()))
    return forward_difference(*sides)


def scale(block: str) -> Any:
    return lambda model: model.get_submodule(block).weight.data.mul_(1.01)


def round_off(model: nn.Module) -> None:
    model[0].weight.data.mul_(1 + 1e-6)


@pytest.mark.parametrize(("change", "block", "same"), [
    (lambda model: None, None, True),
    (scale("0"), "0", False),
    (scale("1.0"), "1.0", False),
    (scale("2"), "2", False),
    (round_off, None, False),
])  # fmt: skip
def test_the_innermost_block_that_parts_first_is_named(change: Any, block: str | None, same: bool) -> None:
    diff = parted(change)
    assert (diff.block, diff.same, diff.n_calls) == (block, same, (1, 1))
    assert diff.order == ("", "0", "1", "1.0", "1.1", "2")


@pytest.mark.parametrize(("dtype", "limit"), [
    (torch.float32, 2.0**-15), (torch.float64, 2.0**-44), (torch.float16, 2.0**-5), (torch.bfloat16, 2.0**-3.5),
])  # fmt: skip
@pytest.mark.parametrize(("share", "same"), [(-0.99, True), (0.99, True), (-1.01, False), (1.01, False)])
def test_sketches_are_equal_up_to_256_roundings_and_half_of_the_digits(
    dtype: torch.dtype, limit: float, share: float, *, same: bool
) -> None:
    norm, off = 4.0, share * limit * 4.0
    before = ((3,), dtype, torch.finfo(dtype).eps, norm, 1.0, -2.0)
    for after in ((norm + off, 1.0, -2.0), (norm, 1.0 + off, -2.0), (norm, 1.0, -2.0 + off)):
        assert watched_step._same((before,), ((*before[:3], *after),)) is same
    assert not watched_step._same((before,), (before, before))
    assert not watched_step._same((before,), (((4,), *before[1:]),))


def test_settings_mode_and_number_of_calls_are_reported() -> None:
    def coarse(model: nn.Module) -> None:
        model.eval()
        model[1][0].eps = 0.1

    diff = parted(coarse, n_calls=3)
    assert diff.in_baseline == "LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)"
    assert diff.in_candidate == "LayerNorm((4,), eps=0.1, elementwise_affine=True, bias=True) in eval mode"
    assert diff.n_calls == (1, 3)


class Holder(nn.Module):
    held: Any

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held
        self.register_buffer("table", torch.zeros(3))


class Plain:
    def __init__(self) -> None:
        self.n = 0


def changed(before: Any, mutate: Any) -> list[tuple[str, str, str]]:
    model = nn.Sequential(Holder(before))
    audit = StateAudit(model)
    audit.on_phase("forward")
    audit.on_phase("backward")
    mutate(model[0])
    audit.on_phase("optimizer")
    # This file holds the values too, in the marks of its test functions.
    return [(change.block, change.name, change.kind) for change in audit.changes.values() if change.block]


def set_to(value: Any) -> Any:
    return lambda holder: setattr(holder, "held", value)


def touch_torch(holder: Holder) -> None:
    """Changes fields of torch's own and the position of a generator."""
    holder.eval()
    holder.register_forward_hook(lambda *_: None)
    holder.held.manual_seed(5)


CHANGED: dict[str, tuple[Any, Any]] = {
    "number": (1, set_to(2)),
    "type": (1, set_to(1.0)),
    "none": (None, set_to(3)),
    "list": ([1], lambda holder: holder.held.append(2)),
    "dict": ({"a": [1]}, lambda holder: holder.held["a"].append(2)),
    "tensor": (torch.zeros(2), lambda holder: holder.held.add_(1)),
    "tensor in list": ([torch.zeros(2)], lambda holder: holder.held[0].add_(1)),
    "set": ({1, 2}, lambda holder: holder.held.add(3)),
    "object": (Plain(), lambda holder: setattr(holder.held, "n", 1)),
    "gone": (1, lambda holder: delattr(holder, "held")),
}
UNCHANGED: list[tuple[Any, Any]] = [
    *((value, lambda holder: None) for value in (1, float("nan"), "text", [1, {"a": torch.ones(2)}], (1, 2), None)),
    *((value, lambda holder: None) for value in (Plain(), len)),
    (torch.ones(2), set_to(torch.ones(2))),  # a loss kept on the module is computed again with the same bits
    (torch.Generator(), touch_torch),
]


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_is_seen(name: str) -> None:
    assert changed(*CHANGED[name]) == [("0", "held", "attribute")]


def test_a_buffer_is_told_from_attributes_and_where_nothing_changes_nothing_is_seen() -> None:
    assert changed(0, lambda holder: holder.table.add_(1)) == [("0", "table", "buffer")]
    assert [changed(*case) for case in UNCHANGED] == [[]] * len(UNCHANGED)


@pytest.mark.parametrize("moving", ["forward", "backward", "optimizer"])
def test_only_backward_is_judged_and_accumulation_reports_a_change_once(moving: str) -> None:
    model = nn.Sequential(Holder(0))
    audit = StateAudit(model)
    for phase in [*("forward", "backward") * 3, "optimizer"]:
        audit.on_phase(phase)
        model[0].held += phase == moving
    audit.close()
    texts = [(change.after_forward, change.after_backward) for change in audit.changes.values()]
    assert texts == ([("0", "1")] if moving == "backward" else [])
