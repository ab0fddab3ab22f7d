"""How a model is split into pipeline stages and how microbatches pass through them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from explorer.record.base import Record

CheckpointMode = Literal["always", "except_last", "never"]
"""Which microbatches are checkpointed: torchgpipe's words and meaning."""

PipelineEngine = Literal["inproc", "replay", "procs", "torchrun"]
OWN_SCHEDULE = "own schedule"
"""As rows of a person's own are called where a schedule's name stands."""


class PipelinePlan(Record):
    """Stages as lists of fqns, in execution order, and the schedule that drives them."""

    stages: tuple[tuple[str, ...], ...]
    n_microbatches: Annotated[int, Meta(ge=1, le=1024)]
    schedule: str = "GPipe"
    """torch's own strings: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV."""
    n_ranks: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """None: one rank a stage; two stages a rank for the schedules that need several."""
    checkpoint: CheckpointMode = "always"
    """Applies to the blocks that the policy recomputes. In eval mode it applies all the same: what is recomputed
    does not depend on the mode."""
    keyed_rng: bool = True
    """Dropout is seeded by (seed, block, microbatch), so that every split draws the same masks."""
    deferred_batch_norm: bool = False
    """Running statistics move once per batch instead of once per microbatch."""
    actions: tuple[tuple[str, ...], ...] = ()
    """An own schedule, one row of actions (`2F0`, `2B0`, `2I0`, `2W0`) a rank; empty: generated from `schedule`."""

    @property
    def schedule_name(self) -> str:
        """What a reader is told."""
        return OWN_SCHEDULE if self.actions else self.schedule
