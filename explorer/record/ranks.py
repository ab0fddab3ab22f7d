"""One step of a script that several processes share, as each of its ranks recorded it: ranks side by side."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from explorer.record.base import MOST_RANKS, Record
from explorer.record.graph import RECORDED, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec


class RecordedRanks(Record):
    """The same step on every rank that wrote a file. A rank that was not refused memory may have written none."""

    ranks: tuple[Measurement, ...]
    """Ascending by rank; each says its own `rank`."""
    n_ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    """Processes of the training."""
    recorded_in: str
    """`train.py:42, step 2`: without the rank."""

    @property
    def by_rank(self) -> dict[int, Measurement]:
        return {run.rank or 0: run for run in self.ranks}

    @property
    def fullest(self) -> Measurement:
        """The rank that held most."""
        return max(self.ranks, key=lambda run: run.held_peak_bytes or 0)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a file."""
        return tuple(sorted(set(range(self.n_ranks)) - self.by_rank.keys()))

    @property
    def spec(self) -> RunSpec:
        """The spec of the fullest rank, under the name that all share."""
        return replace(self.fullest.spec, model=ModelRef(target=f"{RECORDED}{self.recorded_in}"))

    def headlines(self) -> dict[str, Any]:
        """The derived figures of the list of runs: those of the fullest rank, by name."""
        run = self.fullest
        return {
            "n_ranks": self.n_ranks,
            "fullest_rank": run.rank,
            "complete": all(one.complete for one in self.ranks),
            "held_peak_bytes": run.held_peak_bytes,
            "step_peak_bytes": run.step_peak_bytes,
        }
