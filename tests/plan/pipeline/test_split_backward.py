"""A backward in two, put together from blocks by hand."""

from __future__ import annotations

import msgspec

from explorer.plan.pipeline.split_backward import all_in_weight, as_one_checkpoint, halves, in_a_row
from explorer.record.pipeline_cost import ActionCost, BlockCost, LastBlock, SplitCost

KEPT = SplitCost(input_ms=1.0, weight_ms=1.0, input_extra_bytes=30, owed_bytes=20, weight_extra_bytes=10,
                 first_weight_extra_bytes=18, weight_end_bytes=-40)  # fmt: skip
AGAIN = SplitCost(input_ms=2.0, weight_ms=4.0, input_recompute_ms=1.0, weight_recompute_ms=3.0, weight_ms_per_block=0.5,
                  input_extra_bytes=130, owed_bytes=50, weight_extra_bytes=300, first_weight_extra_bytes=308,
                  weight_end_bytes=200)  # fmt: skip
BLOCK = BlockCost(
    blocks=("b",),
    kept=ActionCost(forward_ms=1.0, backward_ms=2.0, saved_bytes=100, split=KEPT),
    recomputed=ActionCost(forward_ms=1.0, backward_ms=3.0, recompute_ms=1.0, saved_bytes=10, split=AGAIN),
    parameter_bytes=8,
    gradient_bytes=8,
    output_bytes=10,
)


def test_recomputed_blocks_pile_up_until_the_last_one_is_done() -> None:
    cost = in_a_row([BLOCK] * 3, [BLOCK.recomputed] * 3, 1.0)
    assert cost is not None
    assert cost.input_extra_bytes == 50 + 50 + 130
    assert cost.owed_bytes == 150
    assert cost.weight_extra_bytes == 200 + 200 + 300
    assert cost.first_weight_extra_bytes == 2 * (200 + 8) + 308
    assert cost.weight_ms == 3 * 4.0 + 0.5 * (0 + 1 + 2)
    assert (cost.input_recompute_ms, cost.weight_recompute_ms) == (3.0, 9.0)


def test_kept_blocks_free_as_they_go() -> None:
    cost = in_a_row([BLOCK] * 2, [BLOCK.kept] * 2, 1.0)
    assert cost is not None
    assert (cost.weight_extra_bytes, cost.weight_end_bytes) == (10, -80)


def test_the_last_block_lets_go_of_its_graph_when_i_ends() -> None:
    last = LastBlock(
        input_extra_bytes=25, held_bytes=15, owed_bytes=5, weight_extra_bytes=9, first_weight_extra_bytes=12
    )
    kept = msgspec.structs.replace(BLOCK.kept, split=msgspec.structs.replace(KEPT, last=last))
    cost = in_a_row([BLOCK] * 2, [kept] * 2, 1.0)
    assert cost is not None
    assert cost.owed_bytes == 20 + 5
    assert cost.input_extra_bytes == 15 + 30  # while I is in the first block, the last one still holds its graph
    assert (cost.weight_extra_bytes, cost.first_weight_extra_bytes) == (10, 18)
    alone = in_a_row([BLOCK], [kept], 1.0)
    assert alone is not None
    assert (alone.input_extra_bytes, alone.owed_bytes, alone.weight_extra_bytes) == (25, 5, 9)


def test_a_microbatch_of_half_the_rows_makes_gradients_of_the_same_size() -> None:
    cost = in_a_row([BLOCK], [BLOCK.recomputed], 0.5)
    assert cost is not None
    assert cost.first_weight_extra_bytes == 8 + 150
    assert (cost.weight_extra_bytes, cost.owed_bytes, cost.input_ms) == (150, 25, 1.0)


def test_one_block_without_a_measurement_leaves_the_stage_without() -> None:
    bare = msgspec.structs.replace(BLOCK.kept, split=None)
    assert in_a_row([BLOCK, BLOCK], [BLOCK.kept, bare], 1.0) is None
    unknown = msgspec.structs.replace(BLOCK, recomputed=bare)
    assert as_one_checkpoint([BLOCK, unknown]) is None


def test_in_one_checkpoint_every_group_runs_all_blocks_again() -> None:
    cost = as_one_checkpoint([BLOCK, BLOCK])
    assert cost is not None
    assert cost.input_recompute_ms == 2.0
    assert cost.weight_recompute_ms == (3 + 3) * 2.0
    assert cost.weight_ms == 1.0 + 1.0 + 12.0
    assert cost.weight_end_bytes == 2 * (200 + 3 * 100)  # each of three groups leaves the other block's bytes as well


def test_the_guess_and_the_first_stage() -> None:
    guess, first = halves(BLOCK.recomputed), all_in_weight(BLOCK.recomputed)
    assert (guess.input_ms, guess.weight_ms) == (2.0, 2.0)
    assert (first.input_ms, first.weight_ms, first.owed_bytes) == (0.0, 3.0, 0)
