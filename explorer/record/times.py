"""Repeated readings of a clock with their spread, and how two runs that were read in turn compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from explorer.record.base import Number, Record


class Samples(Record):
    """Repeated readings of one clock, in the order taken."""

    ms: tuple[Number, ...] = ()

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.ms) if self.ms else None

    @property
    def spread_ms(self) -> float | None:
        """Half the distance between the quartiles, about one standard deviation of what a next run would show.

        None below two readings.
        """
        if len(self.ms) < 2:
            return None
        low, _, high = statistics.quantiles(self.ms, n=4, method="inclusive")
        return (high - low) / 2


class Times(Record):
    """Time without any recording, after warm-up."""

    clock: Literal["process CPU time", "CUDA events"]
    step: Samples = Samples()
    forward: Samples = Samples()
    backward: Samples = Samples()
    """Recompute included: nobody can time it apart without disturbing it."""
    optimizer: Samples = Samples()
    beside: Samples = Samples()
    """The same step with everything kept, in turns with `step`; empty: not timed in turns."""
    checkpoint_ms: Number | None = None
    """What a checkpointed call takes beside its second forward and `saved_tensor_ms`, where a model has swept the
    caches since the last one; None: not measured."""
    close_checkpoint_ms: Number | None = None
    """The same where the last one was just before; None: not measured."""
    saved_tensor_ms: Number | None = None
    """What a checkpoint takes for each tensor that its call saves; None: not measured."""
    kept_operator_ms: Number | None = None
    """What an operator takes more in forward and rerun together where results of operators are kept (save_ops):
    torch looks at every one in Python. None: not measured."""


def ratio_with_spread(candidate: Samples, baseline: Samples) -> tuple[float, float] | None:
    """Median and half interquartile range of the paired ratios of an interleaved A/B run; None below two pairs.

    The spread is no bound: with five pairs about one run in three falls outside of it.
    """
    pairs: Sequence[float] = [a / b for a, b in zip(candidate.ms, baseline.ms) if b]
    if len(pairs) < 2:
        return None
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
    return middle, (high - low) / 2
