"""A B200's rows beside a play without data: bytes, refusals, the price of a recompute, and Llama 7B for 80 GB.

Memory is simulated over measured. The price is a ratio of FLOPs; the rows have times. Seconds are those of one CPU.
"""

from __future__ import annotations

import time
from typing import Any

from explorer.engine.bench.measure import measure_without_data
from explorer.engine.device.without_data import without_data
from explorer.engine.model.describe import describe
from explorer.plan.card.cards import CARDS, LARGEST_CARD
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Measurement, ModelRef, Policy, RunSpec, Unit
from explorer.record.card import Card
from tests.golden.b200.loop import LANGUAGE_MODEL, ROWS, simulated

N_LAYERS = 32
BACKWARD_OF_FORWARD = ROWS["memory-xl-s128-fp32-train"]["backward_ms"] / ROWS["memory-xl-s128-fp32-train"]["forward_ms"]
"""Of the same model with everything kept, at 128 tokens: at 2,048 the B200 refused it."""


def held(row: dict[str, Any], run: Measurement) -> str:
    memory = run.card
    assert memory is not None
    if refused := memory.refused:
        return (
            f"refused {refused.n_bytes / 2**30:.2f} GiB in {refused.block}, {refused.op}: "
            f"{refused.allocated_bytes:,} bytes allocated, {refused.free_bytes / 2**30:.2f} GiB reserved and free"
        )
    spans = (
        (least / row[f"peak_{name}_bytes"] - 1, most / row[f"peak_{name}_bytes"] - 1)
        for name, least, most in (
            ("allocated", memory.least_allocated_bytes, memory.allocated_bytes),
            ("reserved", memory.least_reserved_bytes, memory.reserved_bytes),
        )
    )
    texts = (f"{most:+9.4%}" if least == most else f"{least:+9.4%} to {most:+9.4%}" for least, most in spans)
    return "allocated {}  reserved {}".format(*texts)


def prices() -> None:
    """FLOPs of a step with n segments over those of a step that keeps all, beside the rows that have times."""
    model = ModelRef(target=f"{LANGUAGE_MODEL}:build", arguments={"size": "xl", "seq": 2048, "segments": 0})
    endless = Card(name="endless", total_bytes=LARGEST_CARD, capability="10.0")
    keep_all = measure_without_data(RunSpec(model=model, optimizer="none", card=endless))
    with without_data():
        forecaster = Forecaster(keep_all, describe(model))
    times = {row["segments"]: row for row in ROWS.values() if row["segments"] and row["step_ms"]}
    for n in (2, 4, 8, 16, 32):
        size = N_LAYERS // n
        groups = [tuple(f"layers.{i}" for i in range(first, first + size)) for first in range(0, N_LAYERS, size)]
        ratio = forecaster.forecast(Policy(units=tuple(Unit(blocks=blocks) for blocks in groups))).flop_ratio
        measured = ""
        if (row := times.get(n)) is not None:
            forward = row["forward_ms"]
            over = (forward + row["backward_ms"]) / (forward * (1 + BACKWARD_OF_FORWARD))
            measured = f"B200 {over:.3f}, if keep-all's backward takes {BACKWARD_OF_FORWARD:.2f} forwards; "
            measured += f"{row['step_ms'] / times[32]['step_ms']:.3f} of 32 segments"
        print(f"{n:3} segments: forecast {ratio:.3f} of keep-all  {measured}", flush=True)


def main() -> None:
    for row in ROWS.values():
        begun = time.process_time()
        text = held(row, simulated(row))
        print(f"{row['id']:32} {text}  {time.process_time() - begun:5.1f} s of CPU", flush=True)
    prices()
    begun = time.process_time()
    llama = ModelRef(target="hf:LlamaConfig", arguments={"batch": 1, "length": 2048})
    memory = measure_without_data(RunSpec(model=llama, dtype="bfloat16", card=CARDS["h100"])).card
    assert memory is not None
    seconds = time.process_time() - begun
    print(
        f"Llama 7B, bfloat16, AdamW, 2,048 tokens, {memory.card.name}: {memory.allocated_bytes / 2**30:.2f} GiB "
        f"allocated, {memory.reserved_bytes / 2**30:.2f} GiB reserved, {seconds:.1f} s of CPU"
    )


if __name__ == "__main__":
    main()
