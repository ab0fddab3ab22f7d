"""Merging gradient stores.

Without hooks in autograd one can still checkpoint: run the net segment by segment, keep only the borders, then go
backward segment by segment, running each one again. Each backward returns a store, a table from parameter names to
gradients.

In a net whose segments share weights, the same name appears in several stores. Three merges are tried: adding,
overwriting (what extending one table by another does), and adding whole stores up afterwards. The last two sums
differ in their order, and floating-point sums depend on order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from explorer.lab.engine.kit.bench import Answer, Gradients, LabBench, Setting, gradients_of, mean_square
from explorer.lab.engine.kit.nets import WIDTH, Recurrent, Residual, chain
from explorer.lab.engine.kit.rows import baseline_row, compared_row, counted, distance_bars, outcome_sentence
from explorer.lab.engine.kit.segmented import Chain, Store, checkpointed_loss, recurrent_chain, segmented_step

THEME, PLACE = "Segments and gradient stores", 1
QUESTION = "Every segment returns its own table of gradients. How do they become one?"
SWITCHES = {
    "net": (
        "Do the segments share weights?",
        {
            "recurrent": "Yes: a recurrent net uses one cell at every step",
            "chain": "No: a chain of blocks with weights of their own",
        },
    ),
    "segments": ("How many segments?", {"4": "4", "2": "2", "12": "12"}),
}
WORDS = ("segment", "store", "gradient", "bitwise equal", "rounding", "cosine")

N_TOKENS = 12


def run(setting: Setting, bench: LabBench) -> Answer:
    """Three ways to make one store of many, against the plain run and torch's checkpoint."""
    n_segments = int(setting["segments"])
    chained, x = _case(setting["net"], bench)
    expected = _gradients(chained, chained.plain(x))
    exact, exact_x = _case(setting["net"], bench, torch.float64)
    reference = _gradients(exact, exact.plain(exact_x))
    bench.tell("segment by segment", 1, 2)
    per_segment = segmented_step(chained, x, n_segments, "per_segment").stores
    merged: dict[str, Gradients] = {
        "torch's checkpoint": _gradients(chained, checkpointed_loss(chained, x, n_segments)),
        "one store, added": _named(expected, segmented_step(chained, x, n_segments, "add").stores[0]),
        "stores added up afterwards": _named(expected, added_up(per_segment)),
        "one store, overwritten": _named(expected, segmented_step(chained, x, n_segments, "overwrite").stores[0]),
    }
    stores = counted("gradients in all stores", sum(len(store) for store in per_segment))
    rows = (
        baseline_row("plain run", counted("gradients in all stores", len(expected))),
        *(
            compared_row(label, expected, gradients, *([stores] if "afterwards" in label else []), reference=reference)
            for label, gradients in merged.items()
        ),
    )
    chart = distance_bars(rows[1:], "How far is each merged gradient from the plain one?", "merge")
    n_stored, shared = sum(map(len, per_segment)), any(row.outcome == "different" for row in rows)
    findings = (
        f"The stores hold {n_stored} gradients for {len(expected)} parameters: "
        f"{'the segments share weights' if shared else 'no name appears twice'}.",
        outcome_sentence(rows[2]),
        outcome_sentence(rows[3], "the same numbers, summed in a different order" if shared else ""),
        outcome_sentence(rows[4], "it keeps the share of one segment" if shared else "nothing is written twice"),
    )
    return Answer(rows, chart, findings)


def _case(net: str, bench: LabBench, dtype: torch.dtype = torch.float32) -> tuple[Chain, Tensor]:
    """The chain and the tensor that enters it; weights and inputs are the same numbers in every dtype."""
    if net == "chain":
        blocks = chain(Residual, N_TOKENS).to(bench.device, dtype)
        return Chain.of(blocks, mean_square), bench.normal(8, WIDTH).to(dtype)
    torch.manual_seed(0)
    sequence = bench.normal(8, N_TOKENS, WIDTH).to(dtype)
    return recurrent_chain(Recurrent().to(bench.device, dtype), sequence), torch.zeros_like(sequence[:, 0])


def _gradients(chained: Chain, loss: Tensor) -> Gradients:
    chained.model.zero_grad(set_to_none=True)
    loss.backward()
    return gradients_of(chained.model)


def _named(expected: Gradients, store: Store) -> Gradients:
    return {name: store[name].cpu() if name in store else None for name in expected}


def added_up(stores: tuple[Store, ...]) -> Store:
    """Whole stores added one after the other."""
    total: Store = {}
    for store in stores:
        for name, gradient in store.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total
