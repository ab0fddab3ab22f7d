"""The model and the split of the published clusters at a small size: streams, checkpoints, and what a card reserves."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks.clusters import H100, MODELS
from explorer.engine.ranks.predict import play_rank
from explorer.plan.card.step_on_card import memory_on
from explorer.record.allocations import ROLES
from explorer.record.base import column
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import Ranks, RunSpec


def played(split: str) -> Measurement:
    arguments = {"batch": 2, "length": 64}
    return play_rank(
        RunSpec(
            model=ModelRef(target=f"{MODELS}:build", size="small", arguments=arguments),
            ranks=Ranks(n_ranks=8, data="none", parallelize=f"{MODELS}:{split}"),
            card=H100,
            holds_output=False,
        ),
        0,
    )


@pytest.fixture(scope="module")
def whole() -> Measurement:
    return played("split")


def test_gathers_and_gradients_of_fsdp_lie_in_streams_of_their_own(whole: Measurement) -> None:
    log = whole.allocations
    assert log is not None and set(log.stream) == {0, 1, 2}
    roles = {stream: {ROLES[r] for r, s in zip(log.role, log.stream) if s == stream} for stream in (1, 2)}
    gathers, reductions = roles[1], roles[2]
    assert "gathered parameter" in gathers and "gradient" not in gathers
    is_left = [ROLES[r] == "gradient" and died > log.n_ticks for r, died in zip(log.role, log.died)]
    shards = {s for s, left in zip(log.stream, is_left) if left}
    assert "gradient" in reductions and shards == {2}
    activations = [s for r, s in zip(log.role, log.stream) if ROLES[r] in ("saved activation", "recomputed")]
    assert activations and set(activations) == {0}


def test_streams_share_no_cache_on_the_card(whole: Measurement) -> None:
    """Without its streams the same step reserves less, and holds as much."""
    assert whole.card is not None and whole.allocations is not None
    one_stream = replace(whole, allocations=replace(whole.allocations, stream=column()))
    shared = memory_on(H100, one_stream)
    assert shared.reserved_bytes < whole.card.reserved_bytes
    assert shared.requested_bytes == whole.card.requested_bytes


def test_every_second_product_is_kept(whole: Measurement) -> None:
    selective = played("split_selective")
    assert selective.step_peak_bytes is not None and whole.step_peak_bytes is not None
    assert selective.step_peak_bytes > whole.step_peak_bytes
    assert selective.total_flops is not None and whole.total_flops is not None
    assert selective.total_flops < whole.total_flops
