"""Predicted peaks of a rank beside peaks that torchtitan published of real clusters, eager rows alone.

`_cluster_models.py` has the model and its split. A percentage in the sources is of 95.0396 GiB, which an H100 with 96
GB reports; `memory` in torchtitan's log is the reserved peak, `active` the allocated one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from explorer.engine.ranks.predict import play_rank
from explorer.plan.card.cards import CARDS
from explorer.record.card import CardMemory
from explorer.record.graph import ModelRef
from explorer.record.run import Ranks, RunSpec

MODELS = Path(__file__).with_name("_cluster_models.py")
H100 = replace(CARDS["h100"], total_bytes=int(95.0396 * 2**30))
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published step: float32 shards, gathered in bfloat16 and reduced in float32, foreach AdamW."""

    source: str
    size: str
    n_ranks: int
    batch: int
    length: int
    split: str
    is_old: bool = False
    """Of March 2024: the loop keeps its logits in float32, and segments do not expand."""
    active_gib: float | None = None
    reserved_gib: float

    def memory(self) -> CardMemory:
        """The predicted memory of the first rank."""
        arguments: dict[str, int | float | str | bool] = {"batch": self.batch, "length": self.length}
        arguments["loss_in_float"] = not self.is_old
        options = "" if self.is_old else "expandable_segments:True"
        spec = RunSpec(
            model=ModelRef(target=f"{MODELS}:build", size=self.size, arguments=arguments),
            ranks=Ranks(n_ranks=self.n_ranks, data="none", parallelize=f"{MODELS}:{self.split}"),
            card=replace(H100, options=options),
            holds_output=self.is_old,
        )
        memory = play_rank(spec, 0).card
        assert memory is not None
        return memory


EARLY = {"size": "llama-2-7b", "n_ranks": 8, "batch": 8, "length": 2048, "is_old": True}
LATE = {"size": "llama-3.1-8b", "batch": 2, "length": 8192, "split": "split_selective"}
ROWS = (
    Row(source="torchtitan #165, AC", split="split", active_gib=22.73, reserved_gib=31.02, **EARLY),  # type: ignore[arg-type]
    Row(source="torchtitan #165, SAC", split="split_selective", active_gib=49.54, reserved_gib=59.41, **EARLY),  # type: ignore[arg-type]
    Row(source="benchmarks of 2024-12, table 1", n_ranks=8, reserved_gib=82.4, **LATE),  # type: ignore[arg-type]
    Row(source="benchmarks of 2024-12, table 3", n_ranks=128, reserved_gib=67.0, **LATE),  # type: ignore[arg-type]
)


def beside(predicted_bytes: int, measured_gib: float | None) -> str:
    """`22.70 / 22.73 GiB, -0.1 %`."""
    gib = predicted_bytes / GIB
    if measured_gib is None:
        return f"{gib:.2f} GiB / not published"
    return f"{gib:.2f} / {measured_gib:.2f} GiB, {gib / measured_gib - 1:+.1%}"


def main() -> None:
    for row in ROWS:
        begun, memory = time.process_time(), row.memory()
        print(
            f"{row.source:32} {row.size}, {row.n_ranks} ranks: allocated "
            f"{beside(memory.allocated_bytes, row.active_gib)}; "
            f"reserved {beside(memory.reserved_bytes, row.reserved_gib)}  {time.process_time() - begun:.0f} s of CPU",
            flush=True,
        )


if __name__ == "__main__":
    main()
