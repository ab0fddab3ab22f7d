"""One optimizer step, or one for each store.

Instead of merging the stores, one could hand them to the optimizer one after the other. For plain SGD a step on a + b
is a step on a and then on b. Momentum and Adam remember past gradients, and weight decay shrinks weights at every
step. For them two small steps may not be one big one.

Both runs start from the same weights and see the same batches, in float64 so that rounding stays out of the picture.
The chart shows how far their weights drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from explorer.lab.engine.kit.bench import Answer, Gradients, LabBench, Setting
from explorer.lab.engine.kit.nets import WIDTH, Recurrent
from explorer.lab.engine.kit.rows import (
    DISTANCE,
    baseline_row,
    chart,
    compared_row,
    counted,
    gap,
    line,
    number,
    size_of,
)
from explorer.lab.engine.kit.segmented import Merge, install, recurrent_chain, segmented_step

THEME, PLACE = "Segments and gradient stores", 2
QUESTION = "May the optimizer step on each segment's store instead of on the merged one?"
SWITCHES = {
    "optimizer": (
        "Which optimizer?",
        {"adam": "Adam", "sgd": "SGD", "momentum": "SGD with momentum 0.9", "decay": "SGD with weight decay 0.1"},
    ),
    "segments": ("How many segments?", {"4": "4", "2": "2", "1": "1"}),
}
WORDS = ("store", "segment", "gradient", "relative distance")

N_TOKENS, N_TRAINED = 12, 10
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "decay": partial(torch.optim.SGD, lr=0.05, weight_decay=0.1),
}
ROUNDING_FLOOR = 1e-12
"""Some thousand times the epsilon of float64 (2.2e-16): below it, ten steps of training have only rounded."""


def run(setting: Setting, bench: LabBench) -> Answer:
    """The same optimizer fed with one merged store, or with every store in turn."""
    n_segments = int(setting["segments"])
    merged = _trained("add", setting["optimizer"], n_segments, bench)
    bench.tell("one step for each store", 1, 2)
    each = _trained("per_segment", setting["optimizer"], n_segments, bench)
    rows = [baseline_row("one step on the merged store", counted("optimizer steps", N_TRAINED))]
    for step in (0, N_TRAINED - 1):
        rows.append(
            compared_row(
                f"one step for each store, after batch {step + 1}",
                merged[step],
                each[step],
                counted("optimizer steps", (step + 1) * n_segments),
                reference=merged[step],
            )
        )
    distances = [gap(a, b).distance or 0.0 for a, b in zip(merged, each)]
    titles = ("How far apart are the weights?", "batch", f"{DISTANCE} of the weights")
    series = line(setting["optimizer"], distances, "candidate")
    drawn = chart("lines", titles, [str(i + 1) for i in range(N_TRAINED)], [series])
    findings = (
        f"After one batch the weights differ by {size_of(rows[1])} of their size.",
        f"After {N_TRAINED} batches they differ by {size_of(rows[2])}.",
        f"The merged run took {N_TRAINED} optimizer steps, the other one {N_TRAINED * n_segments}.",
        "Here stepping store by store is the same thing, up to the rounding of float64."
        if max(number(row, DISTANCE) or 0.0 for row in rows[1:]) < ROUNDING_FLOOR
        else "Stepping store by store is another optimizer: its memory (or its decay) acts at every small step.",
    )
    return Answer(tuple(rows), drawn, findings)


def _trained(merge: Merge, optimizer_name: str, n_segments: int, bench: LabBench) -> list[Gradients]:
    """The weights after each of N_TRAINED batches, in float64."""
    torch.manual_seed(0)
    net = Recurrent().to(bench.device).double()
    optimizer = OPTIMIZERS[optimizer_name](list(net.parameters()))
    weights: list[Gradients] = []
    for batch in range(N_TRAINED):
        sequence = bench.normal(8, N_TOKENS, WIDTH, seed=batch).double()
        step = segmented_step(recurrent_chain(net, sequence), torch.zeros_like(sequence[:, 0]), n_segments, merge)
        for store in step.stores:
            install(store, net)
            optimizer.step()
        weights.append({name: p.detach().cpu().clone() for name, p in net.named_parameters()})
    return weights
