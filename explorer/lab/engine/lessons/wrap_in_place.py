"""Wrap a block without renaming it.

To checkpoint a block, something has to stand between the caller and the block's forward. There are three usual
places. The first is a bound function put on the block itself, as this explorer does. The second is a wrapper module put
in the block's place. The third is a small function that remembers the old forward (a closure).

Other code looks at the model too: optimizers and saved weights go by parameter names, type checks ask for the block's
class, and training tools copy models. Each way is tried on the same net and asked the same four questions; the
gradient is compared as well.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import Answer, LabBench, Setting, step_gradients
from explorer.lab.engine.kit.nets import BATCH, WIDTH, Residual, block_names, chain
from explorer.lab.engine.kit.rows import baseline_row, chart, compared_row, counted, line, number, outcome_sentence
from explorer.lab.record import LabFigure, LabRow
from explorer.record.policy import Policy

THEME, PLACE = "Wrapped blocks", 4
QUESTION = "After a block was made to recompute, is it still the same model for other code?"
SWITCHES = {
    "printed": (
        "Which wrapped model to print?",
        {
            "in_place": "The block's own forward, replaced in place",
            "wrapper": "A wrapper module in the block's place",
            "closure": "A closure over the old forward",
        },
    ),
}
WORDS = ("recompute", "gradient", "bitwise equal")

WAYS = {"in_place": "forward replaced in place", "wrapper": "wrapper module", "closure": "closure over forward"}
QUESTIONS = (
    "parameter names kept",
    "saved-weight names kept",
    "blocks of the same class",
    "deep copy runs its own weights",
)


class Wrapper(nn.Module):
    """The block one level deeper, under the name `inner`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> object:
        return checkpoint(self.inner, x, use_reentrant=False)


def wrap(model: nn.Sequential, way: str) -> None:
    """Makes every block of `model` recompute, in one of the three WAYS."""
    if way == "in_place":
        apply_policy(model, Policy.recompute(block_names(model)))
    elif way == "wrapper":
        for name, block in list(model.named_children()):
            setattr(model, name, Wrapper(block))
    else:
        for block in model.children():
            # A copy of the block gets the same function, and with it the forward of the old block.
            block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)


def run(setting: Setting, bench: LabBench) -> Answer:
    """Names, class, copies and gradients of a model wrapped in three ways."""
    x = bench.normal(BATCH, WIDTH)
    plain = chain(Residual, 3).to(bench.device)
    expected = step_gradients(plain, x)
    rows, printed = [baseline_row("not wrapped")], ""
    for done, (way, label) in enumerate(WAYS.items()):
        bench.tell(label, done, len(WAYS))
        model = chain(Residual, 3).to(bench.device)
        wrap(model, way)
        by_position = dict(zip(expected, step_gradients(model, x).values()))
        rows.append(compared_row(label, expected, by_position, *_unchanged(plain, model, x)))
        if way == setting["printed"]:
            printed = str(model)
    series = [line(row.label, [100.0 * (number(row, name) or 0.0) for name in QUESTIONS]) for row in rows[1:]]
    titles = ("What does each way of wrapping leave as it was?", "question", "kept")
    findings = tuple(outcome_sentence(row, _losses(row)) for row in rows[1:])
    return Answer(tuple(rows), chart("bars", titles, QUESTIONS, series, "%"), findings, printed)


def _unchanged(plain: nn.Sequential, model: nn.Sequential, x: Tensor) -> tuple[LabFigure, ...]:
    names, saved = dict(plain.named_parameters()), plain.state_dict()
    same_names = sum(name in names for name, _ in model.named_parameters())
    same_saved = sum(name in saved for name in model.state_dict())
    same_class = sum(type(a) is type(b) for a, b in zip(plain, model))
    shares = (
        same_names / len(names),
        same_saved / len(saved),
        same_class / len(plain),
        float(_copy_is_its_own(model, x)),
    )
    return tuple(counted(question, share, "share") for question, share in zip(QUESTIONS, shares))


def _copy_is_its_own(model: nn.Sequential, x: Tensor) -> bool:
    """A copy whose weights are all zero returns its input (every block is x + ...), if it runs its own weights."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        return torch.equal(copied(x), x)


def _losses(row: LabRow) -> str:
    lost = [question for question in QUESTIONS if row.value(question) != 1.0]
    return f"fails at: {', '.join(lost)}" if lost else "leaves everything as it was"
