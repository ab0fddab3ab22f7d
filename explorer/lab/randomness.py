"""Wrapped blocks that draw random numbers: masks of forward and of the rerun, side by side."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.engine.world.rng import RngState, seed_everything
from explorer.lab.kit.bench import (
    COSINE,
    Bench,
    Gradients,
    Setting,
    Shown,
    baseline_row,
    compared_row,
    gradients_of,
    mean_square,
    measured,
    percent,
    size_of,
    step_gradients,
)
from explorer.lab.kit.nets import BATCH, WIDTH, Dropped, block_names, blocks_of, chain, torch_mask
from explorer.record.lab import LabChart, LabRow, LabSeries, RowOutcome
from explorer.record.policy import KEEP_ALL, Policy

N_BLOCKS = 4
MISMATCH = "mask elements that differ"


def dropout(setting: Setting, bench: Bench) -> Shown:
    """Masks, gradients and loss with and without torch's snapshot."""
    p, preserve = float(setting["p"]), setting["preserve_rng_state"] == "on"
    x = bench.normal(BATCH, WIDTH)
    plain, model = (chain(partial(Dropped, p), N_BLOCKS).to(bench.device) for _ in range(2))
    expected, loss = _step_and_loss(plain, KEEP_ALL, x)
    bench.tell("recomputed step", 1, 2)
    found, candidate_loss = _step_and_loss(model, Policy.recompute(block_names(model), preserve_rng_state=preserve), x)
    shares = _mismatches(model)
    rows = (
        baseline_row("kept", measured("loss", loss)),
        compared_row("recomputed", expected, found, measured("loss", candidate_loss)),
        *(_mask_row(f"mask of block{i}", share) for i, share in enumerate(shares)),
    )
    chance = 2 * p * (1 - p)
    chart = _mask_chart(shares, chance, "two independent masks, 2p(1-p)")
    same_loss = "bitwise equal" if loss == candidate_loss else "different"
    findings = (
        f"The rerun's masks differ from forward's in {percent(sum(shares) / N_BLOCKS)} of their elements; two masks "
        f"that have nothing to do with each other would differ in {percent(chance)}.",
        f"Gradients: {rows[1].outcome}, off by {size_of(rows[1])} of their size, cosine "
        f"{float(rows[1].value(COSINE) or 0):.4f}.",
        f"The loss is {same_loss} to the kept run's, so the loss {_tells(rows[1])}.",
    )
    return Shown(rows, chart, findings)


def _tells(row: LabRow) -> str:
    return "and the gradient agree" if row.outcome == "bitwise equal" else "says nothing about the gradient"


def _step_and_loss(model: nn.Module, policy: Policy, x: Tensor) -> tuple[Gradients, float]:
    with apply_policy(model, policy):
        torch.manual_seed(0)
        loss = mean_square(model(x))
        loss.backward()
    return gradients_of(model), float(loss.detach())


def _mismatches(model: nn.Sequential) -> list[float]:
    """Share of each block's mask that its rerun drew differently."""
    pairs = [block.dropout.masks for block in blocks_of(model, Dropped)]
    return [float((masks[0] != masks[1]).double().mean()) for masks in pairs]


def _mask_row(label: str, share: float) -> LabRow:
    outcome: RowOutcome = "bitwise equal" if share == 0 else "different"
    return LabRow(label=label, outcome=outcome, figures=(measured(MISMATCH, share, "share"),))


def _mask_chart(shares: list[float], chance: float, chance_name: str) -> LabChart:
    return LabChart(
        kind="bars",
        title="How much of each mask did the rerun draw differently?",
        x_title="block",
        y_title=MISMATCH,
        unit="%",
        x=tuple(f"block{i}" for i in range(len(shares))),
        series=(
            LabSeries(name="rerun against forward", y=tuple(100 * share for share in shares), part="recompute"),
            LabSeries(name=chance_name, y=tuple(100 * chance for _ in shares), part="baseline"),
        ),
    )


class _Replayed(torch.autograd.Function):
    """A reentrant checkpoint with a snapshot of one's own choosing; a parameter's gradient goes straight to `.grad`."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, snapshot: RngState | None, x: Tensor) -> Tensor:
        ctx.block, ctx.snapshot = block, snapshot
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        if ctx.snapshot is not None:
            ctx.snapshot.restore()
        with torch.enable_grad():
            output = ctx.block(leaf)
        torch.autograd.backward(output, gradient)
        return None, None, leaf.grad


def one_snapshot(setting: Setting, bench: Bench) -> Shown:
    """Which forward mask each rerun's mask agrees with, when snapshots are taken in the wrong place."""
    x, make = bench.normal(4 * BATCH, WIDTH), partial(Dropped, 0.5)
    expected = step_gradients(chain(make, N_BLOCKS).to(bench.device), x.clone().requires_grad_())
    model = chain(make, N_BLOCKS).to(bench.device)
    bench.tell("one snapshot", 1, 2)
    torch.manual_seed(0)
    whole = RngState.capture(model)
    state = x.clone().requires_grad_()
    for block in model:
        state = _Replayed.apply(block, _snapshot(setting["snapshot"], whole, block), state)
    mean_square(state).backward()
    masks = [block.dropout.masks for block in blocks_of(model, Dropped)]
    own = [_agreement(rerun, forward) for forward, rerun in masks]
    first = [_agreement(rerun, masks[0][0]) for _, rerun in masks]
    rows = (
        baseline_row("kept"),
        compared_row("recomputed", expected, gradients_of(model)),
        *(
            LabRow(
                label=f"mask of block{i}",
                outcome="bitwise equal" if own[i] == 1 else "different",
                figures=(
                    measured("agrees with its own forward", own[i], "share"),
                    measured("agrees with block0's forward", first[i], "share"),
                ),
            )
            for i in range(N_BLOCKS)
        ),
    )
    chart = LabChart(
        kind="bars",
        title="Whose forward mask does each rerun repeat? (50 % is chance)",
        x_title="rerun of",
        y_title="mask elements that agree",
        unit="%",
        x=tuple(f"block{i}" for i in range(N_BLOCKS)),
        series=(
            LabSeries(name="with its own forward", y=tuple(100 * share for share in own), part="baseline"),
            LabSeries(name="with block0's forward", y=tuple(100 * share for share in first), part="recompute"),
        ),
    )
    return Shown(rows, chart, tuple(_snapshot_findings(rows, own, first)))


def _snapshot(where: str, whole: RngState, block: nn.Module) -> RngState | None:
    if where == "none":
        return None
    return whole if where == "model" else RngState.capture(block)


def _agreement(a: Tensor, b: Tensor) -> float:
    return float((a == b).double().mean())


def _snapshot_findings(rows: tuple[LabRow, ...], own: list[float], first: list[float]) -> list[str]:
    n_own, n_first = sum(share == 1 for share in own), sum(share == 1 for share in first)
    return [
        f"{n_own} of {N_BLOCKS} blocks repeat their own mask; {n_first} of {N_BLOCKS} repeat the mask of block0.",
        f"Gradients: {rows[1].outcome}, off by {size_of(rows[1])} of their size.",
    ]


class _OwnDropped(Dropped):
    """Draws its mask from a generator of its own."""

    def __init__(self, p: float) -> None:
        super().__init__(p, self.own_mask)
        self.generator = torch.Generator().manual_seed(5)

    def own_mask(self, x: Tensor, p: float) -> Tensor:
        return (torch.rand(x.shape, generator=self.generator) >= p).to(x)


def _python_mask(x: Tensor, p: float) -> Tensor:
    return torch.tensor([random.random() >= p for _ in range(x.numel())]).view(x.shape).to(x)


def _numpy_mask(x: Tensor, p: float) -> Tensor:
    return torch.from_numpy(np.random.random(x.shape) >= p).to(x)


SOURCES: dict[str, Callable[[], nn.Module]] = {
    "generator": partial(_OwnDropped, 0.3),
    "python": partial(Dropped, 0.3, _python_mask),
    "numpy": partial(Dropped, 0.3, _numpy_mask),
    "torch": partial(Dropped, 0.3, torch_mask),
}


def own_generators(setting: Setting, bench: Bench) -> Shown:
    """A mask from a generator that torch does not stash, without and with the explorer putting it back."""
    source = setting["source"]
    named = {
        "generator": tuple(f"block{i}.generator" for i in range(N_BLOCKS)),
        "python": ("python",),
        "numpy": ("numpy",),
        "torch": (),
    }[source]
    restore = named if setting["restore"] == "yes" else ()
    expected = _seeded_gradients(_fresh(source, bench), KEEP_ALL, bench)
    rows, shares = [baseline_row("kept")], [0.0] * N_BLOCKS
    for done, use_reentrant in enumerate((True, False)):
        label = "reentrant" if use_reentrant else "non-reentrant"
        bench.tell(label, done, 2)
        model = _fresh(source, bench)
        policy = Policy.recompute(block_names(model), use_reentrant=use_reentrant, restore_rng=restore)
        rows.append(compared_row(label, expected, _seeded_gradients(model, policy, bench)))
        shares = _mismatches(model)
    rows.extend(_mask_row(f"mask of block{i}", share) for i, share in enumerate(shares))
    chart = _mask_chart(shares, 2 * 0.3 * 0.7, "two independent masks, 2p(1-p)")
    wrong = [row.label for row in rows[1:3] if row.outcome != "bitwise equal"]
    findings = (
        f"Wrong gradients and no word about it: {' and '.join(wrong)}."
        if wrong
        else "Both checkpoints are bitwise equal.",
        f"The rerun's masks differ in {percent(sum(shares) / N_BLOCKS)} of their elements, the gradient is off by "
        f"{size_of(rows[2])} of its size.",
        f"Put back before each rerun: torch's default generators{', ' + ', '.join(restore) if restore else ''}.",
    )
    return Shown(tuple(rows), chart, findings)


def _fresh(source: str, bench: Bench) -> nn.Sequential:
    return chain(SOURCES[source], N_BLOCKS).to(bench.device)


def _seeded_gradients(model: nn.Module, policy: Policy, bench: Bench) -> Gradients:
    seed_everything(0)
    with apply_policy(model, policy):
        return step_gradients(model, bench.normal(BATCH, WIDTH).requires_grad_())
