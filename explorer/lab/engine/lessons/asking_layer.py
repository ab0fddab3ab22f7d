"""A layer that asks whether it runs again.

Some layers change a little with every forward: a warm-up counter, a moving average, a codebook that learns. The layer
here scales its output by 1 / (1 + number of forwards so far). Recomputed, it counts twice and scales differently the
second time, so backward sees other numbers than forward did.

explorer.is_recomputing() tells a layer that this forward is a rerun. A layer that asks can skip the counting and use
the value that the first forward used.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.engine.policy.units import is_recomputing
from explorer.lab.engine.kit.bench import Answer, Gradients, LabBench, Setting, step_gradients
from explorer.lab.engine.kit.nets import BATCH, WIDTH, block_names, blocks_of, chain
from explorer.lab.engine.kit.rows import baseline_row, chart, compared_row, counted, line, outcome_sentence
from explorer.record.policy import KEEP_ALL, Policy

THEME, PLACE = "Wrapped blocks", 7
QUESTION = "Can a layer that counts its own forwards be checkpointed?"
SWITCHES = {
    "asks": ("Does the layer ask?", {"no": "No, it counts every forward", "yes": "Yes, it counts first forwards only"}),
    "steps": ("How many training steps?", {"5": "5", "1": "1", "20": "20"}),
}
WORDS = ("recompute", "gradient", "relative distance", "cosine")


class Warming(nn.Module):
    """Scales down with every forward it counts."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.n_forwards = 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.asks and is_recomputing()):
            self.n_forwards += 1
        return torch.tanh(self.linear(x / (1.0 + self.n_forwards)))


def run(setting: Setting, bench: LabBench) -> Answer:
    """A counting layer under recompute: its counter and the gradient of each step."""
    n_steps = int(setting["steps"])
    make = partial(Warming, asks=setting["asks"] == "yes")
    trained: dict[str, tuple[list[Gradients], list[int]]] = {}
    for done, label in enumerate(("kept", "recomputed")):
        bench.tell(label, done, 2)
        model = chain(make, 3).to(bench.device)
        gradients, counts = [], []
        with apply_policy(model, KEEP_ALL if label == "kept" else Policy.recompute(block_names(model))):
            for step in range(n_steps):
                gradients.append(step_gradients(model, bench.normal(BATCH, WIDTH, seed=step)))
                counts.append(blocks_of(model, Warming)[0].n_forwards)
        trained[label] = (gradients, counts)
    (expected, right), (recomputed, counts) = trained["kept"], trained["recomputed"]
    rows = (
        baseline_row("kept", counted("forwards counted", right[-1])),
        compared_row("recomputed, first step", expected[0], recomputed[0], counted("forwards counted", counts[0])),
        compared_row("recomputed, last step", expected[-1], recomputed[-1], counted("forwards counted", counts[-1])),
    )
    titles = ("How many forwards did the layer count?", "training step", "forwards counted")
    series = (line("kept", right, "baseline"), line("recomputed", counts, "candidate"))
    drawn = chart("lines", titles, [str(i + 1) for i in range(n_steps)], series)
    findings = (
        f"Kept, the layer counts {right[-1]} forwards; recomputed, {counts[-1]}.",
        outcome_sentence(rows[1], f"the counter of the kept run says {right[0]}"),
    )
    return Answer(rows, drawn, findings)
