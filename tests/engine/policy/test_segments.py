"""Segments over a ModuleList: the bare step bit by bit, and a sentence where a model does more in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.rng import seed_everything
from explorer.errors import InvalidPolicy
from explorer.record.policy import Policy
from tests.engine.policy.nets import assert_same, bits, reruns

N_BLOCKS = 6


class Block(nn.Module):
    """A norm with running statistics, dropout, a residual; scaled by what is the same for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: Tensor, pair: tuple[Tensor, Tensor], *, power: int = 1) -> Tensor:
        h = self.dropout(torch.tanh(self.up(self.norm(x)) * scale)) ** power
        return x + self.down(h) * pair[0] + pair[1]


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(block() for _ in range(N_BLOCKS))

    def arguments(self, x: Tensor) -> tuple[Any, dict[str, Any]]:
        return (x.mean().sigmoid(), (x.mean(1, keepdim=True), x.std())), {"power": 1}

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        args, keywords = self.arguments(x)
        for block in self.blocks:
            x = block(x, *args, **keywords)
        return self.head(x)


class ByKeyword(Net):
    """Everything by keyword, and the tuple made anew for each block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        scale, shift = x.mean().sigmoid(), x.std()
        for block in self.blocks:
            x = block(x=x, pair=(scale, shift), scale=scale)
        return self.head(x)


class Converting(Net):
    """Conversions between blocks that convert nothing, and dropout that drops nothing: diffusers and BART have them."""

    rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        args, keywords = self.arguments(x)
        for block in self.blocks:
            x = block(x, *args, **keywords).to(dtype=torch.float32).type_as(args[0]).float()
            x = nn.functional.dropout(x, p=self.rate)
        return self.head(x)


class Returning(nn.Module):
    """A block that returns what it was given first and second, and something for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, residual: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        h = self.dropout(torch.relu(self.mix(x)) * mask)
        return h + residual, x * 0.5, h.mean(), None


class ByTuple(Net):
    def __init__(self) -> None:
        super().__init__(Returning)

    def forward(self, x: Tensor) -> Tensor:
        x, residual, mask = self.stem(x), x, torch.ones(8)
        for block in self.blocks:
            returned = block(x, residual, mask)
            x, residual = returned[0], returned[1]
        return self.head(x + residual)


class Swapping(ByTuple):
    """Hands the second result of a block on as the first."""

    def forward(self, x: Tensor) -> Tensor:
        x, residual, mask = self.stem(x), x, torch.ones(8)
        for block in self.blocks:
            residual, x = block(x, residual, mask)[:2]
        return self.head(x)


class Biased(nn.Module):
    """A block that returns the bias that it was given, as T5's does."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return self.dropout(torch.relu(self.mix(x) + bias)) * mask, bias


class ByBias(Net):
    def __init__(self) -> None:
        super().__init__(Biased)

    def forward(self, x: Tensor) -> Tensor:
        x, mask, bias = self.stem(x), torch.ones(8), self.stem(x).mean(0, keepdim=True)
        for block in self.blocks:
            x, bias = block(x, mask, bias)
        return self.head(x) + bias.sum()


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, scale = state
        return self.block(x, scale, (scale, scale)), scale * 0.9


class ByState(Net):
    """One tuple is handed from block to block."""

    def __init__(self) -> None:
        super().__init__(Whole)

    def forward(self, x: Tensor) -> Tensor:
        state = self.stem(x), x.mean()
        for block in self.blocks:
            state = block(state)
        return self.head(state[0] * state[1])


class Attributes(nn.Module):
    """Blocks that are plain attributes, called in another order than they were made in, twice around."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.last(self.first(x))
        return x


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    seed_everything(0)
    return kind()


def segments(*lengths: int) -> list[tuple[str, ...]]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [tuple(f"blocks.{i}" for i in range(end - n, end)) for n, end in zip(lengths, ends)]


TWO = segments(2, 4)


@pytest.mark.parametrize("kind", [Net, ByKeyword, Converting, ByTuple, ByBias, ByState])
def test_segments_of_a_list_give_the_bare_step(kind: Callable[[], nn.Module]) -> None:
    bare, model = bits(made(kind)), made(kind)
    with apply_policy(model, Policy.recompute(TWO)):
        assert_same(bare, bits(model))
        assert reruns(model) == ["blocks.2", "blocks.0"]
    assert_same(bare, bits(made(kind)))


def test_reentrant_segments_give_the_bare_step() -> None:
    """For blocks that take tensors alone: reentrant checkpointing sees no gradient inside a tuple."""
    bare, model = bits(made(ByTuple)), made(ByTuple)
    with apply_policy(model, Policy.recompute(TWO, use_reentrant=True)):
        assert_same(bare, bits(model))
        assert reruns(model) == ["blocks.2", "blocks.0"]


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    skip=st.integers(0, 2),
    inside=st.sets(st.sampled_from(["blocks.0.up", "blocks.1.norm", "blocks.4.down", "stem", ""])),
    early_stop=st.booleans(),
)
def test_any_segments_with_units_inside_and_around(
    lengths: list[int], skip: int, inside: set[str], early_stop: bool
) -> None:
    chosen = [tuple(fqn for fqn in unit if int(fqn[7:]) < N_BLOCKS) for unit in segments(*lengths)][skip:]
    policy = Policy.recompute([*(unit for unit in chosen if unit), *inside], early_stop=early_stop)
    bare, model = made(Net), made(Net)
    with apply_policy(model, policy):
        assert_same(bits(bare), bits(model))
        assert_same(bits(bare, seed=2), bits(model, seed=2))  # running statistics add up


def test_blocks_that_are_attributes_and_run_twice() -> None:
    bare, model = bits(made(Attributes)), made(Attributes)
    with apply_policy(model, Policy.recompute([("first", "last")])):
        assert_same(bare, bits(model))
        assert reruns(model) == ["first", "first"]


def test_two_passes_may_be_under_way_and_one_given_up() -> None:
    results = []
    for policy in (Policy(), Policy.recompute(TWO)):
        model: Any = made(Net).eval()
        apply_policy(model, policy)
        seed_everything(5)
        one, other, lost = (torch.randn(16, 8, requires_grad=True) for _ in range(3))
        args, keywords = model.arguments(torch.ones(16, 8))
        x, y = one, other
        model.blocks[0](lost, *args, **keywords)
        for block in model.blocks:
            x, y = block(x, *args, **keywords), block(y, *args, **keywords)
        (x * 2 + y.square()).mean().backward()
        results.append([x.detach(), y.detach(), one.grad, other.grad, *(p.grad for p in model.blocks.parameters())])
    assert all(map(torch.equal, *results))


def test_hooks_see_what_blocks_are_really_given() -> None:
    def seen(policy: Policy) -> list[tuple[str, Tensor, Tensor]]:
        model, calls = made(Net), list[tuple[str, Tensor, Tensor]]()
        for name, block in model.blocks.named_children():  # type: ignore[union-attr, operator]
            block.register_forward_hook(
                lambda _, args, out, name=name: calls.append((name, args[0].detach(), out.detach()))
            )
        apply_policy(model, policy)
        seed_everything(1)
        model(torch.randn(16, 8))
        return calls

    pairs = list(zip(seen(Policy()), seen(Policy.recompute(TWO)), strict=True))
    assert len(pairs) == N_BLOCKS
    assert all(a == b and torch.equal(x, y) and torch.equal(p, q) for (a, x, p), (b, y, q) in pairs)


def test_without_gradients_blocks_run_one_by_one_and_any_may_be_called() -> None:
    model = made(Net).eval()
    apply_policy(model, Policy.recompute(TWO))
    x = torch.randn(16, 8)
    args, keywords = model.arguments(x)  # type: ignore[operator]
    with torch.no_grad():
        assert torch.equal(model(x), made(Net).eval()(x))
        model.blocks[3](x, *args, **keywords)  # type: ignore[index, operator]


class Sums(Net):
    """A model that reads what a block returns: by name of the case, in the middle of a segment."""

    case = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        args, keywords = self.arguments(x)
        states = []
        for i, block in enumerate(self.blocks):
            if self.case == "skips" and i == 3:
                continue
            if self.case == "differs":
                args = (args[0] * 1.0, *args[1:])
            if self.case == "power":
                keywords = {"power": i + 1}
            if self.case == "more" and i == 3:
                keywords = {}
            x = block(x, *args, **keywords)
            if self.case == "adds":
                x = x + 1
            if self.case == "stops" and i == 3:
                break
            states.append(x)
        return self.head(torch.stack(states).mean(0) if self.case == "states" else x)


REFUSED = [
    (Sums, {"case": "adds"}, "What blocks.0 returns was to go to blocks.1 alone, and add reads it"),
    (Sums, {"case": "states"}, "What blocks.0 returns was to go to blocks.1 alone, and stack reads it"),
    (Sums, {"case": "stops"}, "What blocks.3 returns was to go to blocks.4 alone, and linear reads it"),
    (Sums, {"case": "skips"}, "blocks.4 was called where blocks.3 was to follow"),
    (Sums, {"case": "differs"}, "blocks.1 was called with another value for its argument 2"),
    (Sums, {"case": "power"}, "blocks.1 was called with another value for its power"),
    (Sums, {"case": "more"}, "blocks.3 was called with another value for its power"),
    (Converting, {"rate": 0.5}, "and dropout reads it"),
    (Swapping, {}, "blocks.1 was called with another value for its argument 1"),
]


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_a_model_that_does_more_between_blocks_is_refused(
    kind: Callable[[], nn.Module], options: dict[str, Any], words: str
) -> None:
    model = made(kind)
    vars(model).update(options)
    apply_policy(model, Policy.recompute(TWO))
    with pytest.raises(InvalidPolicy) as caught:
        bits(model)
    assert words in caught.value.sentence, caught.value.sentence
    assert "recomputed as one segment" in caught.value.sentence and "one by one" in caught.value.hint
    with torch.no_grad():
        model(torch.randn(16, 8))


def test_hidden_states_that_nobody_reads_may_be_collected() -> None:
    model, bare = made(Sums), made(Net)
    apply_policy(model, Policy.recompute(TWO))
    assert_same(bits(bare), bits(model))


def test_a_block_called_alone_is_refused_where_gradients_are_wanted() -> None:
    model = made(Net)
    apply_policy(model, Policy.recompute(TWO))
    x = torch.randn(16, 8)
    args, keywords = model.arguments(x)  # type: ignore[operator]
    with pytest.raises(InvalidPolicy, match=r"blocks\.1 was called without what blocks\.0 returns"):
        model.blocks[1](x, *args, **keywords)  # type: ignore[index, operator]


def test_what_a_block_returns_tells_its_shape() -> None:
    model = made(Net)
    apply_policy(model, Policy.recompute(TWO))
    x = torch.randn(16, 8)
    args, keywords = model.arguments(x)  # type: ignore[operator]
    given = model.blocks[0](x, *args, **keywords)  # type: ignore[index, operator]
    assert (given.shape, given.dtype, given.device, given.size(0), len(given)) == ((16, 8), x.dtype, x.device, 16, 16)
    assert given.requires_grad and given.is_contiguous() and given.dim() == given.ndim == 2


def test_what_can_be_told_before_any_run() -> None:
    model = made(Net)
    model.blocks[1].compile(backend="eager")  # type: ignore[index, operator]
    with pytest.raises(InvalidPolicy, match="compiled in place"):
        apply_policy(model, Policy.recompute([("blocks.0", "blocks.1")]))
    same = nn.Linear(8, 8)
    twice = nn.Module()
    twice.layers = nn.ModuleList([same, nn.Tanh(), same])
    with pytest.raises(InvalidPolicy, match="one block stands in it twice"):
        apply_policy(twice, Policy.recompute([("layers.0", "layers.1", "layers.2")]))
