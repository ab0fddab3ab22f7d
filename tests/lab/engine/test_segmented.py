"""The segmented engine against the plain run: bit for bit, weights shared or not, with the peak of a checkpoint."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from explorer.errors import InvalidPolicy
from explorer.lab.engine.kit.bench import LabBench, mean_square
from explorer.lab.engine.kit.nets import Dropped, Normed, Recurrent, Residual, chain
from explorer.lab.engine.kit.segmented import (
    Chain,
    Store,
    checkpointed_loss,
    cut,
    install,
    recurrent_chain,
    segmented_step,
)
from explorer.lab.engine.lessons.gradient_stores import added_up
from explorer.lab.engine.lessons.segment_memory import peak_bytes

WIDTH = 16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def recurrent(length: int, seed: int = 0, batch: int = 4, width: int = WIDTH) -> tuple[Chain, Tensor]:
    torch.manual_seed(seed)
    net, sequence = Recurrent(width), torch.randn(batch, length, width)
    return recurrent_chain(net, sequence), torch.zeros(batch, width)


def plain_store(chained: Chain, x: Tensor, seed: int = 0) -> Store:
    torch.manual_seed(seed)
    chained.model.zero_grad(set_to_none=True)
    chained.plain(x).backward()
    store = {name: p.grad.clone() for name, p in chained.model.named_parameters() if p.grad is not None}
    chained.model.zero_grad(set_to_none=True)
    return store


def unequal(expected: Store, actual: Store) -> list[str]:
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 9), n_segments=st.integers(1, 9), seed=st.integers(0, 999))
def test_one_store_is_bitwise_the_plain_run_when_segments_share_weights(
    length: int, n_segments: int, seed: int
) -> None:
    chained, x = recurrent(length, seed)
    expected = plain_store(chained, x)
    step = segmented_step(chained, x, min(n_segments, length))
    assert unequal(expected, step.stores[0]) == []
    assert len(step.stores) == 1


@settings(max_examples=15, deadline=None)
@given(n_segments=st.integers(1, 5), seed=st.integers(0, 999))
def test_one_store_is_bitwise_the_plain_run_through_dropout_and_batchnorm(n_segments: int, seed: int) -> None:
    kinds = [partial(Dropped, 0.3), Normed, Residual, Normed, partial(Dropped, 0.5)]
    plain, model = (nn.Sequential(*(kind() for kind in kinds)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    expected = plain_store(Chain.of(plain, mean_square), x, seed)
    torch.manual_seed(seed)
    step = segmented_step(Chain.of(model, mean_square), x, n_segments)
    assert unequal(expected, step.stores[0]) == []
    assert unequal(dict(plain.named_buffers()), dict(model.named_buffers())) == []


def test_random_numbers_stand_where_the_plain_run_leaves_them() -> None:
    model, x = chain(partial(Dropped, 0.3), 4), torch.randn(8, WIDTH)
    torch.manual_seed(3)
    mean_square(model(x)).backward()
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    segmented_step(Chain.of(model, mean_square), x, 2)
    assert torch.equal(torch.get_rng_state(), expected)


def test_the_loss_is_that_of_the_plain_run() -> None:
    chained, x = Chain.of(chain(Residual, 4), mean_square), torch.randn(8, WIDTH)
    assert torch.equal(segmented_step(chained, x, 3).loss, chained.plain(x).detach())


def test_no_grad_field_is_touched_and_frozen_parameters_are_left_out() -> None:
    model = chain(Residual, 3)
    model.block1.requires_grad_(False)
    step = segmented_step(Chain.of(model, mean_square), torch.randn(8, WIDTH), 3)
    assert all(p.grad is None for p in model.parameters())
    assert step.stores[0].keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    install(step.stores[0], model)
    assert [name for name, p in model.named_parameters() if p.grad is None] == [
        n for n, _ in model.named_parameters() if "block1" in n
    ]


def test_adding_whole_stores_up_afterwards_only_rounds() -> None:
    chained, x = recurrent(12)
    expected = plain_store(chained, x)
    stores = segmented_step(chained, x, 4, "per_segment").stores
    total = added_up(stores)
    assert len(stores) == 4
    assert unequal(expected, total) != [], "the order of the sums no longer matters: the test of rule 3 proves nothing"
    for name, gradient in expected.items():
        torch.testing.assert_close(total[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize(("batch", "width"), [(256, 32), (4, 128)])
@pytest.mark.parametrize("n_segments", [2, 4, 12])
def test_peak_is_that_of_torchs_checkpoint(batch: int, width: int, n_segments: int) -> None:
    chained, x = recurrent(12, batch=batch, width=width)

    def checkpointed() -> None:
        chained.model.zero_grad(set_to_none=True)
        checkpointed_loss(chained, x, n_segments).backward()

    checkpointed()
    chained.model.zero_grad(set_to_none=True)
    ours = peak_bytes(lambda: segmented_step(chained, x, n_segments), LabBench())
    theirs = peak_bytes(checkpointed, LabBench())
    # Two RNG states (5,056 bytes each) more or less are the only freedom.
    assert abs(ours - theirs) <= 2 * 5056 + 64, (ours, theirs)


@given(n_steps=st.integers(1, 40), n_segments=st.integers(1, 40))
def test_cut_keeps_order_and_balance(n_steps: int, n_segments: int) -> None:
    steps = tuple(partial(torch.add, other=i) for i in range(n_steps))
    if n_segments > n_steps:
        with pytest.raises(InvalidPolicy, match=f"{n_segments} segments .* {n_steps} steps"):
            cut(steps, n_segments)
        return
    parts = cut(steps, n_segments)
    assert [step for part in parts for step in part] == list(steps)
    assert len(parts) == n_segments and max(map(len, parts)) - min(map(len, parts)) <= 1
