"""An input that needs no gradient.

The reentrant checkpoint is one operation in the graph. Autograd includes an operation only if one of its inputs needs
a gradient, and a block's parameters are not inputs of that operation. So a block whose input is raw data, or comes
from a frozen layer, drops out of the graph, parameters and all.

The same net is run plainly, with the non-reentrant and with the reentrant checkpoint. Its input is data, or the output
of a frozen embedding, as when only adapters are trained.
"""

from __future__ import annotations

from functools import partial

import torch

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import Answer, Gradients, LabBench, Raised, Setting, gradients_of, mean_square
from explorer.lab.engine.kit.nets import BATCH, ENGINES, WIDTH, Smooth, chain, engine_policy
from explorer.lab.engine.kit.rows import chart, counted, outcome_sentence, series_of, sides

THEME, PLACE = "Traps", 1
QUESTION = "Does a checkpointed block train when its input does not ask for a gradient?"
SWITCHES = {
    "input": (
        "What does the first block receive?",
        {
            "data": "Data, which needs no gradient",
            "asked": "Data that was told to require a gradient",
            "trained": "The output of a trained layer",
        },
    ),
    "blocks": ("Which blocks are recomputed?", {"all": "All three", "first": "The first only"}),
}
WORDS = ("reentrant", "non-reentrant", "gradient")

MISSING = "parameters without a gradient"


def run(setting: Setting, bench: LabBench) -> Answer:
    """Which parameters get a gradient, depending on what enters the first recomputed block."""
    blocks = [f"block{i}" for i in range(3)][: 3 if setting["blocks"] == "all" else 1]
    runs = {engine: partial(_fed_step, engine, blocks, setting["input"], bench) for engine in ENGINES}
    expected = runs.pop("keep")()
    rows = sides(bench, ("keep", expected), runs, lambda result: [counted(MISSING, _n_missing(result))])
    titles = ("How many of the parameters get no gradient?", "checkpoint", MISSING)
    drawn = chart("bars", titles, ENGINES, [series_of(rows, MISSING)])
    missing = (f"{row.value(MISSING)} of {len(expected)} parameters get no gradient" for row in rows[1:])
    return Answer(rows, drawn, tuple(map(outcome_sentence, rows[1:], missing)))


def _fed_step(engine: str, blocks: list[str], source: str, bench: LabBench) -> Gradients:
    model = chain(Smooth, 3).to(bench.device)
    x = bench.normal(BATCH, WIDTH)
    if source == "asked":
        x.requires_grad_()
    elif source == "trained":
        x = x * torch.ones(WIDTH, device=bench.device, requires_grad=True)
    with apply_policy(model, engine_policy(engine, blocks)):
        mean_square(model(x)).backward()
    return gradients_of(model)


def _n_missing(result: Gradients | Raised) -> int:
    """A backward that raised gave no parameter a gradient: 6 parameters in 3 blocks."""
    return 6 if isinstance(result, Raised) else sum(gradient is None for gradient in result.values())
