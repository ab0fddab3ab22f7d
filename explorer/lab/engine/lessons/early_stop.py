"""Where a recompute ends.

A recompute is there to bring back the saved tensors. When the last of them is back, there is no reason to go on, and
torch leaves the block in the middle (early_stop). Layers behind that point run once, those before it twice.

That is good for the cost and matters for anything that counts on both runs: hooks, counters, timers. The block here
has four layers; each counts its own forwards. What its last layer saves decides where the rerun ends.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import Answer, Gradients, LabBench, Setting, gradients_of, mean_square
from explorer.lab.engine.kit.nets import BATCH, WIDTH
from explorer.lab.engine.kit.rows import baseline_row, chart, compared_row, counted, line
from explorer.lab.record import LabRow
from explorer.record.policy import Policy

THEME, PLACE = "Traps", 4
QUESTION = "Which layers of a block really run again?"
SWITCHES = {
    "last": (
        "What is the block's last layer?",
        {
            "linear": "A linear layer (saves its input)",
            "relu": "ReLU (saves its output)",
            "add": "An addition of a bias (saves nothing)",
        },
    ),
    "early_stop": ("May the recompute end early?", {"on": "Yes (torch's default)", "off": "No"}),
}
WORDS = ("early stop", "recompute", "saved activations")


class Shift(nn.Module):
    """Adds a bias: its backward needs no tensor at all."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


LAST: dict[str, Callable[[], nn.Module]] = {"linear": partial(nn.Linear, WIDTH, WIDTH), "relu": nn.ReLU, "add": Shift}
BEGUN, ENDED = "forwards begun", "forwards ended"


def run(setting: Setting, bench: LabBench) -> Answer:
    """How often each layer of a recomputed block runs in one step."""
    policy = Policy.recompute(["block"], early_stop=setting["early_stop"] == "on")
    plain, model = (_layered(setting["last"]).to(bench.device) for _ in range(2))
    expected, *_ = _counted_step(plain, bench)
    with apply_policy(model, policy):
        gradients, begun, ended = _counted_step(model, bench)
    layers = [name for name, _ in model.get_submodule("block").named_children()]
    rows = (
        baseline_row("kept"),
        compared_row("recomputed", expected, gradients),
        *(
            LabRow(label=name, outcome="shown", figures=(counted(BEGUN, begun[name]), counted(ENDED, ended[name])))
            for name in layers
        ),
    )
    titles = ("How often does each layer run in one step?", "layer of the block", "forwards in one step")
    series = (
        line(BEGUN, [begun[name] for name in layers]),
        line(ENDED, [ended[name] for name in layers], "recompute"),
    )
    twice = [name for name in layers if ended[name] == 2]
    broken = [name for name in layers if begun[name] > ended[name]]
    skipped = [name for name in layers if begun[name] == 1]
    findings = (
        f"Ran to their end twice: {', '.join(twice) or 'no layer'}. Left in the middle of the rerun: "
        f"{', '.join(broken) or 'none'}. Not reached by the rerun: {', '.join(skipped) or 'none'}.",
        f"Gradients are {rows[1].outcome}"
        + (": what was left out, backward never reads." if broken or skipped else "; the whole block ran again."),
    )
    return Answer(rows, chart("bars", titles, layers, series), findings)


def _layered(last: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = OrderedDict[str, nn.Module](first=nn.Linear(WIDTH, WIDTH), gelu=nn.GELU(), middle=nn.Linear(WIDTH, WIDTH))
    layers["last"] = LAST[last]()
    return nn.Sequential(OrderedDict[str, nn.Module](block=nn.Sequential(layers), head=nn.Linear(WIDTH, WIDTH)))


def _counted_step(model: nn.Module, bench: LabBench) -> tuple[Gradients, Counter[str], Counter[str]]:
    """Gradients, and the forwards begun and ended of each layer of the block.

    A rerun that stops early leaves its last layer begun and not ended.
    """
    begun, ended = Counter[str](), Counter[str]()
    for name, layer in model.get_submodule("block").named_children():
        layer.register_forward_pre_hook(lambda *_, name=name: begun.update([name]))
        layer.register_forward_hook(lambda *_, name=name: ended.update([name]))
    mean_square(model(bench.normal(BATCH, WIDTH))).backward()
    return gradients_of(model), begun, ended
