"""The cost of a split backward: I for the gradient of a stage's input, W later for the gradients of its weights.

    kept        I frees nothing, because W needs the graph; I leaves the gradients at which W begins
    recomputed  I runs the checkpoint forward; W runs the checkpoint again for every group of parameters. Tensors that
                a group does not read stay until the last group is done, because the graph lives until then

Within a stage I goes from the last block to the first, W from the first to the last. The first stage of a model has no
input gradient: its I does nothing, and its W does the whole backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from explorer.record.pipeline_cost import ActionCost, BlockCost, SplitCost

Priced = tuple[ActionCost, SplitCost]
"""Costs of a microbatch with an undivided backward, and with a split backward."""


def priced_backward(cost: ActionCost) -> Priced:
    """The cost, and the cost of its split backward: measured, or else an estimate."""
    return cost, cost.split or halves(cost)


def halves(cost: ActionCost) -> SplitCost:
    """An estimate without measurement: two equal halves of the plain backward, with recompute in both."""
    each_ms = (cost.backward_ms - cost.recompute_ms) / 2 + cost.recompute_ms
    return SplitCost(
        input_ms=each_ms,
        weight_ms=each_ms,
        input_recompute_ms=cost.recompute_ms,
        weight_recompute_ms=cost.recompute_ms,
        input_extra_bytes=cost.backward_extra_bytes,
        weight_extra_bytes=cost.backward_extra_bytes,
        first_weight_extra_bytes=cost.first_backward_extra_bytes,
    )


def all_in_weight(cost: ActionCost) -> SplitCost:
    """The split backward of the first stage: W does the whole backward."""
    return SplitCost(
        input_ms=0.0,
        weight_ms=cost.backward_ms,
        weight_recompute_ms=cost.recompute_ms,
        weight_extra_bytes=cost.backward_extra_bytes,
        first_weight_extra_bytes=cost.first_backward_extra_bytes,
    )


def in_a_row(blocks: Sequence[BlockCost], costs: Sequence[ActionCost], scale: float) -> SplitCost | None:
    """The split backward of consecutive blocks, for `scale` times the profile's microbatch; None: not all measured."""
    splits = [cost.split for cost in costs if cost.split is not None]
    if len(splits) < len(costs):
        return None
    *inner, last = splits
    splits = [*inner, _at_the_end(last)]
    # While I runs in earlier blocks, the last block still holds the bytes that it frees when I ends.
    held = [*(split.owed_bytes for split in inner), last.owed_bytes if last.last is None else last.last.held_bytes]
    weight_extra = first_extra = made = end = 0
    for block, split in zip(blocks, splits, strict=True):
        own = min(block.gradient_bytes, split.first_weight_extra_bytes)
        first = own + round(scale * (split.first_weight_extra_bytes - own))
        weight_extra = max(weight_extra, end + round(scale * split.weight_extra_bytes))
        first_extra = max(first_extra, made + end + first)
        made += block.gradient_bytes
        end += round(scale * split.weight_end_bytes)
    return SplitCost(
        input_ms=scale * sum(split.input_ms for split in splits),
        weight_ms=scale * sum(split.weight_ms + k * split.weight_ms_per_block for k, split in enumerate(splits)),
        input_recompute_ms=scale * sum(split.input_recompute_ms for split in splits),
        weight_recompute_ms=scale * sum(split.weight_recompute_ms for split in splits),
        input_extra_bytes=max(
            round(scale * (sum(held[k + 1 :]) + split.input_extra_bytes)) for k, split in enumerate(splits)
        ),
        owed_bytes=sum(round(scale * split.owed_bytes) for split in splits),
        weight_extra_bytes=weight_extra,
        first_weight_extra_bytes=first_extra,
        weight_end_bytes=end,
    )


def _at_the_end(split: SplitCost) -> SplitCost:
    """`split` with the bytes of the last block of a stage."""
    if split.last is None:
        return split
    names = ("input_extra_bytes", "owed_bytes", "weight_extra_bytes", "first_weight_extra_bytes")
    return msgspec.structs.replace(split, **{name: getattr(split.last, name) for name in names})


def as_one_checkpoint(blocks: Sequence[BlockCost]) -> SplitCost | None:
    """The split backward of a segment: every group of parameters of a block runs all blocks forward again."""
    kept = [block.kept.split for block in blocks if block.kept.split is not None]
    again = [block.recomputed.split for block in blocks if block.recomputed.split is not None]
    if not len(kept) == len(again) == len(blocks):
        return None
    forward_ms = sum(block.kept.forward_ms for block in blocks)
    saved = sum(block.kept.saved_bytes for block in blocks)
    n_runs = [one.weight_recompute_ms / one.input_recompute_ms if one.input_recompute_ms else 0.0 for one in again]
    end = sum(
        round(split.weight_end_bytes + n * (saved - block.kept.saved_bytes))
        for split, n, block in zip(again, n_runs, blocks, strict=True)
    )
    highest = end + max(split.weight_extra_bytes - split.weight_end_bytes for split in again)
    weight_ms = sum(split.weight_ms - split.weight_recompute_ms for split in again)
    return SplitCost(
        input_ms=forward_ms + sum(split.input_ms for split in kept),
        weight_ms=weight_ms + sum(n_runs) * forward_ms,
        input_recompute_ms=forward_ms,
        weight_recompute_ms=sum(n_runs) * forward_ms,
        weight_ms_per_block=sum(split.weight_ms_per_block for split in again),
        input_extra_bytes=sum(block.kept.saved_bytes for block in blocks[:-1]) + again[-1].input_extra_bytes,
        owed_bytes=sum(split.owed_bytes for split in again),
        weight_extra_bytes=highest,
        first_weight_extra_bytes=highest + sum(block.gradient_bytes for block in blocks),
        weight_end_bytes=end,
    )
