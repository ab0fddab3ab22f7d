"""Regions: which calls a replay leaves out.

torch_remat checkpoints a region of source code and runs it again in backward. Inside, single calls can be marked as
kept: their results stay, and the replay skips them. Unlike torch's own checkpoint it takes no snapshot of the random
generators.

A block with dropout is therefore replayed with another mask. There are two cures: the dropout becomes a kept region, or
a hook takes the missing snapshot. Look at the loss first: it was computed by forward alone. Then look at the gradients.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from explorer.lab.engine.kit.bench import Answer, Gradients, LabBench, Setting, gradients_and_loss
from explorer.lab.engine.kit.nets import BATCH, WIDTH, chain
from explorer.lab.engine.kit.rows import N_BLOCKS, baseline_row, compared_row, distance_bars, measured, outcome_sentence

THEME, PLACE = "Wrapped blocks", 10
QUESTION = "What does a replay get wrong that the loss does not show?"
SWITCHES = {"p": ("How much is dropped?", {"0.1": "10 %", "0.3": "30 %", "0.5": "50 %"})}
WORDS = ("mask", "snapshot", "RNG", "gradient", "relative distance")
RUNS = {
    "replayed": "without a snapshot",
    "dropout kept": "the dropout is a kept region",
    "hook": "a hook sets the generators back",
}


class RegionBlock(nn.Module):
    """x + down(dropout(up(x))), replayed in one of the ways of RUNS; another name keeps everything."""

    def __init__(self, p: float, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.p, self.how = p, how

    def front(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(self.front(x), self.p))

    def forward(self, x: Tensor) -> Tensor:
        replay = partial(checkpoint, use_reentrant=False, preserve_rng_state=self.how == "hook")
        if self.how == "dropout kept":
            return x + replay(self.down, F.dropout(replay(self.front, x), self.p))  # type: ignore[no-any-return]
        return replay(self.body, x) if self.how in RUNS else self.body(x)


def run(setting: Setting, bench: LabBench) -> Answer:
    """Loss and gradients of the replay, of a replay around a kept dropout, and of a replay with a hook."""
    p, x = float(setting["p"]), bench.normal(BATCH, WIDTH)
    expected, loss = _step(p, "everything kept", x, bench)
    rows = [baseline_row("everything kept", measured("loss", loss))]
    for done, how in enumerate(RUNS):
        bench.tell(how, done, len(RUNS))
        gradients, other_loss = _step(p, how, x, bench)
        rows.append(compared_row(how, expected, gradients, measured("loss", other_loss)))
    losses = {row.value("loss") for row in rows}
    same = "are bitwise equal" if len(losses) == 1 else "differ"
    findings = [f"The losses of all {len(rows)} runs {same}."]
    findings += [outcome_sentence(row, RUNS[row.label]) for row in rows[1:]]
    return Answer(tuple(rows), distance_bars(rows[1:], "How far is each gradient off?", "replay"), tuple(findings))


def _step(p: float, how: str, x: Tensor, bench: LabBench) -> tuple[Gradients, float]:
    return gradients_and_loss(chain(partial(RegionBlock, p, how), N_BLOCKS).to(bench.device), x)
