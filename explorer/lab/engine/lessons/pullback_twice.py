"""Calling the pullback twice.

Backward is a function, and a function can be called twice: retain_graph=True asks torch to keep what it needs for
that. A checkpointed block kept nothing, so it has to run again for each call.

With dropout inside, the rerun must draw the very mask of the first forward both times. The experiment calls backward
twice, compares both gradients with the plain ones, and counts how often the block ran.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import (
    Answer,
    Gradients,
    LabBench,
    Raised,
    Setting,
    attempt,
    gradients_of,
    mean_square,
)
from explorer.lab.engine.kit.nets import BATCH, ENGINES, WIDTH, Dropped, block_names, blocks_of, chain, engine_policy
from explorer.lab.engine.kit.rows import chart, compared_row, counted, line, outcome_sentence
from explorer.lab.record import LabRow

THEME, PLACE = "Wrapped blocks", 9
QUESTION = "Does a second backward through the same forward give the same gradient, and what does it cost?"
SWITCHES = {
    "retain_graph": ("Is the graph kept after the first call?", {"yes": "Yes", "no": "No"}),
    "dropout": ("Is there dropout in the blocks?", {"yes": "Yes, 30 %", "no": "No"}),
}
WORDS = ("pullback", "recompute", "non-reentrant", "reentrant", "bitwise equal")


def run(setting: Setting, bench: LabBench) -> Answer:
    """Two backward calls through one forward, for each way of checkpointing."""
    p = 0.3 if setting["dropout"] == "yes" else 0.0
    rows: list[LabRow] = []
    expected: Gradients = {}
    runs: dict[str, list[float | None]] = {}
    for done, engine in enumerate(ENGINES):
        bench.tell(engine, done, len(ENGINES))
        model = chain(partial(Dropped, p), 3).to(bench.device)
        calls: list[str] = []
        blocks_of(model, Dropped)[0].linear.register_forward_hook(lambda *_, calls=calls: calls.append("forward"))
        with apply_policy(model, engine_policy(engine, block_names(model))):
            torch.manual_seed(0)
            loss = mean_square(model(bench.normal(BATCH, WIDTH).requires_grad_()))
            runs[engine] = [1.0]
            for call in ("first", "second"):
                tried = attempt(partial(_pull, model, loss, retain=setting["retain_graph"] == "yes"))
                if not expected and not isinstance(tried, Raised):
                    expected = tried
                rows.append(
                    compared_row(f"{engine}, {call} call", expected, tried, counted("forwards of block0", len(calls)))
                )
                runs[engine].append(None if isinstance(tried, Raised) else float(len(calls)))
    rows[0] = LabRow(label=rows[0].label, outcome="baseline", figures=rows[0].figures)
    titles = ("How often has block0 run its forward so far?", "after", "forwards of block0")
    series = [line(engine, values) for engine, values in runs.items()]
    drawn = chart("bars", titles, ("forward", "first backward", "second backward"), series)
    ran = (f"block0 ran {row.value('forwards of block0')} times in all" for row in rows[1::2])
    return Answer(tuple(rows), drawn, tuple(map(outcome_sentence, rows[1::2], ran)))


def _pull(model: nn.Module, loss: Tensor, *, retain: bool) -> Gradients:
    model.zero_grad(set_to_none=True)
    loss.backward(retain_graph=retain)
    return gradients_of(model)
