"""The price: about one more forward.

A linear layer costs one matrix product forward and two backward (one for its input, one for its weight). A recomputed
block pays its forward again. So recomputing everything should cost about a third more.

Here every operation is counted, not timed. Watch where a rerun ends: backward never asks for a block's own output, so
torch stops as soon as it has what backward needs, unless told otherwise.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from explorer.engine.policy.apply import apply_policy
from explorer.lab.engine.kit.bench import Answer, Gradients, LabBench, Setting, gradients_of, mean_square
from explorer.lab.engine.kit.nets import BATCH, WIDTH, Residual, chain
from explorer.lab.engine.kit.rows import baseline_row, chart, compared_row, counted, line, percent
from explorer.lab.record import LabPart
from explorer.record.policy import KEEP_ALL, Policy

THEME, PLACE = "Wrapped blocks", 5
QUESTION = "How much more arithmetic does a step cost when blocks are recomputed?"
SWITCHES = {
    "blocks": (
        "Which blocks are recomputed?",
        {"all": "All eight", "second": "Every second one", "nested": "All eight, inside two recomputed halves"},
    ),
    "early_stop": ("May a recompute end early?", {"on": "Yes (torch's default)", "off": "No, run to the end"}),
}
WORDS = ("FLOPs", "recompute", "early stop")

PARTS: tuple[LabPart, ...] = ("forward", "recompute", "backward")


def run(setting: Setting, bench: LabBench) -> Answer:
    """FLOPs of forward, recompute and backward, plain and under the chosen policy."""
    inner = [f"half{h}.block{i}" for h in range(2) for i in range(4)]
    blocks = {"all": inner, "second": inner[1::2], "nested": ["half0", "half1", *inner]}[setting["blocks"]]
    policy = Policy.recompute(blocks, early_stop=setting["early_stop"] == "on")
    bench.tell("counting the plain step", 0, 2)
    plain, expected = _count(KEEP_ALL, bench)
    bench.tell("counting the recomputed step", 1, 2)
    total, gradients = _count(policy, bench)
    # The same backward in both runs: whatever the second one computes beyond the first is recompute.
    flops = {"keep": (plain[0], 0, plain[1]), "recompute": (total[0], total[1] - plain[1], plain[1])}
    figures = {k: tuple(counted(part, n, "FLOPs") for part, n in zip(PARTS, parts)) for k, parts in flops.items()}
    rows = (
        baseline_row("keep", *figures["keep"]),
        compared_row("recompute", expected, gradients, *figures["recompute"]),
    )
    titles = ("Where does the arithmetic of a step go?", "policy", "operations")
    series = [line(part, [parts[i] for parts in flops.values()], part) for i, part in enumerate(PARTS)]
    forward, again, backward = flops["recompute"]
    findings = (
        f"The recompute costs {percent(again / forward)} of one forward: {again:,} of {forward:,} FLOPs.",
        f"That makes the whole step {percent(again / (forward + backward))} more expensive, and gradients are "
        f"{rows[1].outcome}.",
        _why(again / forward, setting),
    )
    return Answer(rows, chart("stacked bars", titles, flops, series, "FLOPs"), findings)


def _why(share: float, setting: Setting) -> str:
    if setting["early_stop"] == "on" and share < 1:
        return (
            "Each block has two matrix products of equal size, and backward needs the result of the first one only: "
            "the rerun stops before the second."
        )
    if share > 1:
        return "More than one forward: a block inside a recomputed block runs again for each of them."
    return f"Without early stop every recomputed block runs in full: {percent(share)} of the forward runs twice."


def _count(policy: Policy, bench: LabBench) -> tuple[tuple[int, int], Gradients]:
    """FLOPs of forward and of backward (recompute included), and the gradients."""
    model = nn.Sequential(OrderedDict((f"half{h}", chain(Residual, 4, seed=h)) for h in range(2))).to(bench.device)
    x = bench.normal(BATCH, WIDTH)
    with apply_policy(model, policy):
        with FlopCounterMode(display=False) as forward:
            loss = mean_square(model(x))
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return (int(forward.get_total_flops()), int(backward.get_total_flops())), gradients_of(model)
