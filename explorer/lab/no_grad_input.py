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
from torch import nn

from explorer.engine.policy.apply import apply_policy
from explorer.lab.kit.bench import Answer, Gradients, LabBench, Raised, Setting, attempt, gradients_of, mean_square
from explorer.lab.kit.checkpoints import ENGINES, engine_policy
from explorer.lab.kit.nets import BATCH, WIDTH, Smooth, chain
from explorer.lab.kit.rows import baseline_row, compared_row, counted, series_of
from explorer.record.lab import LabChart, LabRow

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
    rows: list[LabRow] = []
    expected: Gradients = {}
    for done, engine in enumerate(ENGINES):
        bench.tell(engine, done, len(ENGINES))
        model = chain(Smooth, 3).to(bench.device)
        with apply_policy(model, engine_policy(engine, blocks)):
            tried = attempt(partial(_fed_step, model, setting["input"], bench))
        if engine == "keep":
            assert not isinstance(tried, Raised)
            expected = tried
            rows.append(baseline_row("keep", counted(MISSING, _n_missing(tried))))
        else:
            rows.append(compared_row(engine, expected, tried, counted(MISSING, _n_missing(tried))))
    chart = LabChart(
        kind="bars",
        title="How many of the parameters get no gradient?",
        x_title="checkpoint",
        y_title=MISSING,
        x=tuple(ENGINES),
        series=(series_of(rows, MISSING),),
    )
    return Answer(tuple(rows), chart, tuple(_findings(rows, len(expected))))


def _fed_step(model: nn.Module, source: str, bench: LabBench) -> Gradients:
    x = bench.normal(BATCH, WIDTH)
    if source == "asked":
        x.requires_grad_()
    elif source == "trained":
        x = x * torch.ones(WIDTH, device=bench.device, requires_grad=True)
    mean_square(model(x)).backward()
    return gradients_of(model)


def _n_missing(tried: Gradients | Raised) -> int:
    """A backward that raised gave no parameter a gradient: 6 parameters in 3 blocks."""
    return 6 if isinstance(tried, Raised) else sum(gradient is None for gradient in tried.values())


def _findings(rows: list[LabRow], n_parameters: int) -> list[str]:
    findings = []
    for row in rows[1:]:
        if row.outcome == "raised":
            findings.append(f"{row.label.capitalize()}: backward raises ({row.note}); nothing trains.")
        elif row.outcome == "missing":
            findings.append(
                f"{row.label.capitalize()}: {row.value(MISSING)} of {n_parameters} parameters silently get no gradient "
                f"and never train."
            )
        else:
            findings.append(f"{row.label.capitalize()}: gradients are {row.outcome}.")
    return findings
