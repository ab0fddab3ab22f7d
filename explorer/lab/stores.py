"""Segments and gradient stores: the segmented engine, its merges, its optimizer steps and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.lab.kit.bench import (
    COSINE,
    DISTANCE,
    Bench,
    Gradients,
    Setting,
    Shown,
    baseline_row,
    brief,
    compared_row,
    counted,
    gradients_of,
    mean_square,
    size_of,
)
from explorer.lab.kit.nets import WIDTH, Recurrent, Residual, chain
from explorer.lab.kit.segmented import Chain, Merge, Step, Store, cut, install, segmented_step
from explorer.record.lab import LabChart, LabRow, LabSeries

N_STEPS = 12


def recurrent_chain(net: Recurrent, sequence: Tensor) -> Chain:
    """One step of the chain for each token; what travels along the chain is the state."""
    steps = tuple(partial(_read_token, net, sequence[:, t]) for t in range(sequence.shape[1]))
    return Chain(net, steps, mean_square)


def _read_token(net: Recurrent, token: Tensor, state: Tensor) -> Tensor:
    return net.cell(state, token)


def _case(net: str, bench: Bench, dtype: torch.dtype = torch.float32) -> tuple[Chain, Tensor]:
    """The chain and the tensor that enters it; weights and inputs are the same numbers in every dtype."""
    if net == "chain":
        blocks = chain(Residual, N_STEPS).to(bench.device, dtype)
        return Chain.of(blocks, mean_square), bench.normal(8, WIDTH).to(dtype)
    torch.manual_seed(0)
    sequence = bench.normal(8, N_STEPS, WIDTH).to(dtype)
    return recurrent_chain(Recurrent().to(bench.device, dtype), sequence), torch.zeros_like(sequence[:, 0])


def _plain_gradients(chained: Chain, x: Tensor) -> Gradients:
    chained.model.zero_grad(set_to_none=True)
    chained.plain(x).backward()
    return gradients_of(chained.model)


def checkpointed_loss(chained: Chain, x: Tensor, n_segments: int) -> Tensor:
    """The loss, with the same segments under torch's own checkpoint."""
    for steps in cut(chained.steps, n_segments):
        x = checkpoint(partial(_in_turn, steps), x, use_reentrant=False)
    return chained.loss(x)


def _in_turn(steps: Sequence[Step], x: Tensor) -> Tensor:
    for step in steps:
        x = step(x)
    return x


def gradient_stores(setting: Setting, bench: Bench) -> Shown:
    """Three ways to make one store of many, against the plain run and torch's checkpoint."""
    n_segments = int(setting["segments"])
    chained, x = _case(setting["net"], bench)
    expected = _plain_gradients(chained, x)
    reference = _reference(setting["net"], bench)
    bench.tell("segment by segment", 1, 2)
    per_segment = segmented_step(chained, x, n_segments, "per_segment").stores
    found: dict[str, Gradients] = {
        "torch's checkpoint": _checkpoint_gradients(chained, x, n_segments),
        "one store, added": _named(expected, segmented_step(chained, x, n_segments, "add").stores[0]),
        "stores added up afterwards": _named(expected, added_up(per_segment)),
        "one store, overwritten": _named(expected, segmented_step(chained, x, n_segments, "overwrite").stores[0]),
    }
    stores = counted("gradients in all stores", sum(len(store) for store in per_segment))
    rows = (
        baseline_row("plain run", counted("gradients in all stores", len(expected))),
        *(
            compared_row(label, expected, gradients, *([stores] if "afterwards" in label else []), reference=reference)
            for label, gradients in found.items()
        ),
    )
    chart = LabChart(
        kind="bars",
        title="How far is each merged gradient from the plain one?",
        x_title="merge",
        y_title=DISTANCE,
        x=tuple(found),
        series=(
            LabSeries(name=DISTANCE, y=tuple(float(row.value(DISTANCE) or 0.0) for row in rows[1:]), part="candidate"),
        ),
    )
    return Shown(rows, chart, tuple(_merge_findings(rows, len(expected))))


def _checkpoint_gradients(chained: Chain, x: Tensor, n_segments: int) -> Gradients:
    chained.model.zero_grad(set_to_none=True)
    checkpointed_loss(chained, x, n_segments).backward()
    return gradients_of(chained.model)


def _reference(net: str, bench: Bench) -> Gradients:
    """The plain run's gradients in float64, from the same weights and inputs."""
    return _plain_gradients(*_case(net, bench, torch.float64))


def _named(expected: Gradients, store: Store) -> Gradients:
    return {name: store[name].cpu() if name in store else None for name in expected}


def added_up(stores: tuple[Store, ...]) -> Store:
    """Whole stores added one after the other."""
    total: Store = {}
    for store in stores:
        for name, gradient in store.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def _merge_findings(rows: tuple[LabRow, ...], n_parameters: int) -> list[str]:
    _, _, added, afterwards, overwritten = rows
    n_stored = int(afterwards.value("gradients in all stores") or 0)
    shared = n_stored > n_parameters
    said = [
        f"The stores hold {n_stored} gradients for {n_parameters} parameters: "
        + ("the segments share weights." if shared else "no name appears twice."),
        f"One store that every segment adds to is {added.outcome} to the plain run.",
        f"Adding whole stores up afterwards is {afterwards.outcome}"
        + (
            f" (off by {size_of(afterwards)}): the same numbers, summed in another order."
            if afterwards.outcome != "bitwise equal"
            else "."
        ),
    ]
    if overwritten.outcome == "bitwise equal":
        return [*said, "Overwriting does no harm here: nothing is written twice."]
    return [
        *said,
        f"Overwriting keeps the share of one segment only: off by {size_of(overwritten)}, cosine "
        f"{float(overwritten.value(COSINE) or 0):.3f}.",
    ]


N_TRAINED = 10
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "decay": partial(torch.optim.SGD, lr=0.05, weight_decay=0.1),
}


def stepping(setting: Setting, bench: Bench) -> Shown:
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
    distances = [compared_row("", a, b).value(DISTANCE) for a, b in zip(merged, each)]
    chart = LabChart(
        kind="lines",
        title="How far apart are the weights?",
        x_title="batch",
        y_title=f"{DISTANCE} of the weights",
        x=tuple(str(i + 1) for i in range(N_TRAINED)),
        series=(LabSeries(name=setting["optimizer"], y=tuple(float(d or 0.0) for d in distances), part="candidate"),),
    )
    return Shown(tuple(rows), chart, tuple(_stepping_findings(rows, setting)))


def _trained(merge: Merge, optimizer_name: str, n_segments: int, bench: Bench) -> list[Gradients]:
    """The weights after each of N_TRAINED batches, in float64."""
    torch.manual_seed(0)
    net = Recurrent().to(bench.device).double()
    optimizer = OPTIMIZERS[optimizer_name](list(net.parameters()))
    weights: list[Gradients] = []
    for batch in range(N_TRAINED):
        sequence = bench.normal(8, N_STEPS, WIDTH, seed=batch).double()
        step = segmented_step(recurrent_chain(net, sequence), torch.zeros_like(sequence[:, 0]), n_segments, merge)
        for store in step.stores:
            install(store, net)
            optimizer.step()
        weights.append({name: p.detach().cpu().clone() for name, p in net.named_parameters()})
    return weights


def _stepping_findings(rows: list[LabRow], setting: Setting) -> list[str]:
    first, last = rows[1:]
    off = [float(row.value(DISTANCE) or 0.0) for row in (first, last)]
    n = int(setting["segments"])
    if max(off) < ROUNDING_FLOOR:
        verdict = "Here stepping store by store is the same thing, up to the rounding of float64."
    else:
        verdict = "Stepping store by store is another optimizer: its memory (or its decay) acts at every small step."
    return [
        f"After one batch the weights differ by {brief(off[0])} of their size, after {N_TRAINED} by {brief(off[1])}.",
        f"The merged run took {N_TRAINED} optimizer steps, the other one {N_TRAINED * n}.",
        verdict,
    ]


ROUNDING_FLOOR = 1e-12
"""Some thousand times the epsilon of float64 (2.2e-16): below it, ten steps of training have only rounded."""
