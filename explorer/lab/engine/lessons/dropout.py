"""Dropout must draw the same mask again.

Dropout throws away a random part of its input. A recomputed block draws its mask a second time, and backward believes
that this is the mask forward used. If it is a different mask, the gradient belongs to a net that never ran.

torch therefore takes a snapshot of the random generator before each block and puts it back for the rerun
(preserve_rng_state). Run without it first, then with it, and compare masks, gradients and loss.
"""

from __future__ import annotations

from functools import partial

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import Answer, LabBench, Setting, gradients_and_loss
from explorer.lab.engine.kit.nets import BATCH, WIDTH, Dropped, block_names, chain
from explorer.lab.engine.kit.rows import (
    COSINE,
    N_BLOCKS,
    baseline_row,
    chance_of,
    compared_row,
    mask_chart,
    mask_rows,
    measured,
    mismatches,
    percent,
    size_of,
)
from explorer.record.policy import Policy

THEME, PLACE = "Wrapped blocks", 1
QUESTION = "What happens when a recomputed block draws new random numbers?"
SWITCHES = {
    "preserve_rng_state": ("Is the snapshot taken?", {"off": "No", "on": "Yes (torch's default)"}),
    "p": ("How much is dropped?", {"0.3": "30 %", "0.1": "10 %", "0.5": "50 %"}),
}
WORDS = ("mask", "snapshot", "RNG", "gradient", "relative distance", "cosine")


def run(setting: Setting, bench: LabBench) -> Answer:
    """Masks, gradients and loss with and without torch's snapshot."""
    p, preserve = float(setting["p"]), setting["preserve_rng_state"] == "on"
    x = bench.normal(BATCH, WIDTH)
    plain, model = (chain(partial(Dropped, p), N_BLOCKS).to(bench.device) for _ in range(2))
    expected, loss = gradients_and_loss(plain, x)
    bench.tell("recomputed step", 1, 2)
    with apply_policy(model, Policy.recompute(block_names(model), preserve_rng_state=preserve)):
        gradients, candidate_loss = gradients_and_loss(model, x)
    shares = mismatches(model)
    rows = (
        baseline_row("kept", measured("loss", loss)),
        compared_row("recomputed", expected, gradients, measured("loss", candidate_loss)),
        *mask_rows(shares),
    )
    same_loss = "bitwise equal" if loss == candidate_loss else "different"
    findings = (
        f"The rerun's masks differ from forward's in {percent(sum(shares) / N_BLOCKS)} of their elements; two masks "
        f"that have nothing to do with each other would differ in {percent(chance_of(p))}.",
        f"Gradients: {rows[1].outcome}, off by {size_of(rows[1])} of their size, cosine "
        f"{float(rows[1].value(COSINE) or 0):.4f}.",
        f"The loss is {same_loss} to the kept run's, so the loss "
        + ("and the gradient agree." if rows[1].outcome == "bitwise equal" else "says nothing about the gradient."),
    )
    return Answer(rows, mask_chart(shares, p), findings)
