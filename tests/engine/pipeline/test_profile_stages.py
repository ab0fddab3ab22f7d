"""Stages measured alone: a backward in two halves, what each holds, and what a torch without halves still says."""

from __future__ import annotations

import pytest

from explorer.engine.pipeline.play import stage_runner as runner
from explorer.errors import NotOnThisDevice
from explorer.record.pipeline_cost import PipelineProfile
from tests.engine.pipeline.profiles import profiled


def test_a_split_backward_is_measured_in_both_halves(profiles: dict[str, PipelineProfile]) -> None:
    first, *others, _ = profiles["language"].blocks
    assert first.kept.split is None  # there is no gradient of the input there
    for block in others:
        kept, again = block.kept.split, block.recomputed.split
        assert kept is not None
        assert again is not None
        assert kept.input_ms > 0
        assert kept.weight_ms > 0
        assert kept.input_recompute_ms == kept.weight_recompute_ms == 0
        # W runs the block again for each of its groups of parameters: norm, wide, narrow.
        assert again.weight_recompute_ms > 1.2 * again.input_recompute_ms > 0
        assert again.owed_bytes >= kept.owed_bytes > 0  # the recomputed tensors that only W reads
        # Every group frees its part; recomputed it leaves tensors behind as well, how many depends on torch.
        assert kept.weight_end_bytes < min(0, again.weight_end_bytes)


def test_a_torch_without_split_backward_still_prices_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise NotOnThisDevice("This torch has none.", hint="Use another.")

    monkeypatch.setattr(runner, "backward_input", missing)
    blocks = profiled("language").blocks
    assert all(cost.split is None for block in blocks for cost in (block.kept, block.recomputed))
    assert sum(block.kept.backward_ms for block in blocks) > 0
