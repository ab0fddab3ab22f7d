"""One snapshot for all layers.

All layers draw from one generator, one after the other, so each starts where the last one stopped. A tempting
shortcut is to take a single snapshot before the whole model and put it back before any block reruns.

Then every block starts its rerun at the same place in the stream of random numbers. The experiment has a checkpoint
of its own with that shortcut and lays the masks of forward and rerun side by side.
"""

from __future__ import annotations

from functools import partial

import torch

from explorer.engine.state.rng import RngState
from explorer.lab.engine.kit.bench import Answer, LabBench, Setting, gradients_of, mean_square, step_gradients
from explorer.lab.engine.kit.nets import BATCH, WIDTH, Dropped, WrittenOutCheckpoint, blocks_of, chain
from explorer.lab.engine.kit.rows import N_BLOCKS, agreement, baseline_row, chart, compared_row, line, measured, size_of
from explorer.lab.record import LabRow

THEME, PLACE = "Wrapped blocks", 2
QUESTION = "Is one snapshot of the random generator, taken before the model, enough?"
SWITCHES = {
    "snapshot": (
        "Where are snapshots taken?",
        {"model": "Once, before the whole model", "block": "Before each block", "none": "Nowhere"},
    ),
}
WORDS = ("snapshot", "RNG", "mask", "recompute", "reentrant")


def run(setting: Setting, bench: LabBench) -> Answer:
    """Which forward mask each rerun's mask agrees with, when snapshots are taken in the wrong place."""
    x, make = bench.normal(4 * BATCH, WIDTH), partial(Dropped, 0.5)
    expected = step_gradients(chain(make, N_BLOCKS).to(bench.device), x.clone().requires_grad_())
    model = chain(make, N_BLOCKS).to(bench.device)
    bench.tell("one snapshot", 1, 2)
    torch.manual_seed(0)
    whole = RngState.capture(model)
    state = x.clone().requires_grad_()
    for block in model:
        snapshots = {"model": whole, "block": RngState.capture(block), "none": None}
        state = WrittenOutCheckpoint.apply(block, snapshots[setting["snapshot"]], state)
    mean_square(state).backward()
    masks = [block.dropout.masks for block in blocks_of(model, Dropped)]
    by_block = [agreement(rerun, forward) for forward, rerun in masks]
    first = [agreement(rerun, masks[0][0]) for _, rerun in masks]
    rows = (
        baseline_row("kept"),
        compared_row("recomputed", expected, gradients_of(model)),
        *(
            LabRow(
                label=f"mask of block{i}",
                outcome="bitwise equal" if by_block[i] == 1 else "different",
                figures=(
                    measured("agrees with its own forward", by_block[i], "share"),
                    measured("agrees with block0's forward", first[i], "share"),
                ),
            )
            for i in range(N_BLOCKS)
        ),
    )
    titles = ("Whose forward mask does each rerun repeat? (50 % is chance)", "rerun of", "mask elements that agree")
    series = (
        line("with its own forward", [100 * share for share in by_block], "baseline"),
        line("with block0's forward", [100 * share for share in first], "recompute"),
    )
    drawn = chart("bars", titles, [f"block{i}" for i in range(N_BLOCKS)], series, "%")
    n_own, n_first = sum(share == 1 for share in by_block), sum(share == 1 for share in first)
    findings = (
        f"{n_own} of {N_BLOCKS} blocks repeat their own mask; {n_first} of {N_BLOCKS} repeat the mask of block0.",
        f"Gradients: {rows[1].outcome}, off by {size_of(rows[1])} of their size.",
    )
    return Answer(rows, drawn, findings)
