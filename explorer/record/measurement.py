"""The results of a measured step: memory, FLOPs and times by block, and the same step on several ranks.

A `Measurement` is the document. `Samples` and `Times` are its clock readings, `RecordedRanks` one measurement a rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from explorer.record.allocations import ROLES, Allocations, Collective, Phase, PhaseSpan
from explorer.record.base import MOST_RANKS, Column, Count, Number, Origin, Record
from explorer.record.card import CardMemory
from explorer.record.checkpointing import OwnCheckpointing
from explorer.record.failure import Failure
from explorer.record.graph import RECORDED, ModelGraph, ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec


class Samples(Record):
    """Repeated readings of one clock, in the order taken."""

    ms: tuple[Number, ...] = ()

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.ms) if self.ms else None

    @property
    def spread_ms(self) -> float | None:
        """Half the distance between the quartiles, about one standard deviation of what a next run would show.

        Of two or three readings, half the distance between the extremes; None below two readings.
        """
        return _spread(self.ms) if len(self.ms) > 1 else None


class Times(Record):
    """Time without any recording, after warm-up."""

    clock: Literal["process CPU time", "CUDA events"]
    step: Samples = Samples()
    forward: Samples = Samples()
    backward: Samples = Samples()
    """Recompute included: timing it apart would disturb it."""
    optimizer: Samples = Samples()
    beside: Samples = Samples()
    """The same step with everything kept, in turns with `step`; empty: not timed in turns."""
    checkpoint_ms: Number | None = None
    """Overhead of a checkpointed call without its second forward and `saved_tensor_ms`, if the model has swept the
    caches since the last such call; None: not measured."""
    close_checkpoint_ms: Number | None = None
    """The same overhead right after another checkpointed call; None: not measured."""
    saved_tensor_ms: Number | None = None
    """Overhead of a checkpoint for each tensor that its call saves; None: not measured."""
    kept_operator_ms: Number | None = None
    """Overhead of each operator in forward and rerun together if results of operators are kept (save_ops): torch
    looks at every operator in Python. None: not measured."""


def _spread(values: Sequence[float]) -> float:
    if len(values) < 4:
        return (max(values) - min(values)) / 2
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def ratio_with_spread(candidate: Samples, baseline: Samples) -> tuple[float, float] | None:
    """Median and spread of the paired ratios of an interleaved A/B run, see `Samples.spread_ms`; None below two pairs.

    The spread is no bound: with five pairs about one run in three falls outside of it.
    """
    pairs: Sequence[float] = [a / b for a, b in zip(candidate.ms, baseline.ms) if b]
    if len(pairs) < 2:
        return None
    return statistics.median(pairs), _spread(pairs)


class Environment(Record):
    """The machine and the software of a run."""

    device: str
    device_name: str
    torch_version: str
    python_version: str
    platform: str
    n_threads: Count
    total_memory_bytes: Count | None = None
    cuda_version: str = ""
    """CUDA only, like all following fields: the version that torch was built with."""
    cudnn_version: str = ""
    driver_version: str = ""
    tf32: tuple[str, ...] = ()
    """Kinds of operators that could use TensorFloat-32: `convolutions`, `recurrent layers`, `matrix products`."""
    allocator_settings: str = ""
    """Variables that set torch's caching allocator and the workspaces of cuBLAS."""
    capability: str = ""


class AllocatorPeaks(Record):
    """Counters of the allocator for the measured step, independent of the timeline. None: not measured."""

    alone_peak_bytes: Count | None = None
    """Peak of the same step seen by the allocator alone, without the tracker."""
    tracker_peak_bytes: Count | None = None
    """Peak of the storages that the tracker saw; memory inside kernels is missing."""
    requested_peak_bytes: Count | None = None
    """CUDA only, like the next two: the allocator's counters. This one is the drawn peak, to the byte."""
    allocated_peak_bytes: Count | None = None
    reserved_peak_bytes: Count | None = None
    steady_reserved_peak_bytes: Count | None = None
    """Reserved peak of the same step with a warm cache, as in later steps of a training: the GPU needs these bytes
    free. `reserved_peak_bytes` belongs to a step that began with an empty cache."""
    offloaded_peak_bytes: Count | None = None
    """Most bytes that `offload` held in pinned memory of the host during the measured step; None: nothing offloads."""
    allocated: Column | None = None
    """CUDA only: allocated bytes at each tick: the true sizes of the blocks in the allocator's history, ending at its
    counter after the step. In files of earlier versions a lower bound: requests rounded up to 512 bytes."""
    reserved: Column | None = None
    """CUDA only: reserved bytes at each tick, measured: the sum of the segments taken from the driver."""

    @property
    def stranded_bytes(self) -> int | None:
        """Reserved beyond the allocated peak; None: not measured."""
        if self.reserved_peak_bytes is None or self.allocated_peak_bytes is None:
            return None
        return self.reserved_peak_bytes - self.allocated_peak_bytes


class MeasuredBlock(Record):
    """Figures of one block in the measured step: sums over all its calls, blocks inside included."""

    fqn: str
    n_forward: Count
    n_recompute: Count
    """Forward calls in the recompute phase: above zero proves that the policy took effect."""
    saved_after_forward_bytes: Count
    at_peak_bytes: Count
    """Bytes attributed to the block that are alive at the step's peak, parameters and their gradients included."""
    forward_flops: Count
    recompute_flops: Count
    backward_flops: Count
    skipped_flops: Count = 0
    """FLOPs of forward that early stop left out of the recompute."""
    forward: Samples = Samples()
    recompute: Samples = Samples()
    operator_ms: dict[str, Number] = {}
    """Forward by operator, such as `aten.mm.default`, at or below, read one by one: shares of `forward`, no times
    to add to others. Empty: not timed, or it runs none."""
    n_operators: Count | None = None
    """Calls of operators in that forward, views included; None: not counted."""
    n_saved: Count | None = None
    """Tensors that autograd was handed in that forward, parameters and repeated ones included; None: not counted."""
    in_place: dict[str, Count] = {}
    """Calls in forward of operators that write into an argument, by the block's own code."""


class Refused(Record):
    """A run that was out of memory, before one that fits was found."""

    what: str
    """The policy in words: `everything kept`, `every block recomputed`."""
    policy: Policy
    held_peak_bytes: Count | None
    """Lower bound of the bytes that the run needs. None: refused before the recording began."""
    failed_in: str
    """The same as `Measurement.failed_in`."""


class Measurement(Record):
    """One measured step. If the step was cut short, `failure` is set and the recorded part is kept."""

    spec: RunSpec
    environment: Environment
    origin: Origin = "measured"
    """predicted: derived from other runs, see plan/predict/baseline.py, and without times."""
    allocations: Allocations | None = None
    phases: tuple[PhaseSpan, ...] = ()
    peaks: AllocatorPeaks = AllocatorPeaks()
    blocks: tuple[MeasuredBlock, ...] = ()
    times: Times | None = None
    uncounted_ops: dict[str, Count] = {}
    """Calls of operators that do arithmetic as a matrix product does and have no formula: FLOPs leave them out."""
    recorded_in: str = ""
    """Source line of a step with origin `recorded`: `train.py:42`."""
    rank: Annotated[int, Meta(ge=0, lt=MOST_RANKS)] | None = None
    """Number of the process that recorded the step, out of `n_ranks` processes; None: a single process."""
    n_ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)] | None = None
    collectives: tuple[Collective, ...] = ()
    """Calls of torch.distributed in the order of the step."""
    graph: ModelGraph | None = None
    """Graph of the model, if it was observed before the run: a report reads this graph and loads no model. A recorded
    step always has a graph."""
    dtype: str = ""
    """Types of the parameters that ran, the one with the most numbers first: `float32`, `bfloat16, float32`."""
    batch: str = ""
    """Types and shapes of the batch, and whether the explorer made it: `int64[2, 64], made to fit`."""
    loss: float | None = None
    warnings: tuple[str, ...] = ()
    unwatched_parameter_bytes: Count = 0
    """Recorded steps: parameters that optimizers of the step train and that no recorded module holds."""
    left_bytes: Count = 0
    """Recorded steps: results of earlier forwards that were alive when the step began."""
    zero_grad_tick: Count | None = None
    """Recorded steps: the tick of the last call of `zero_grad`; None: the loop called none."""
    keeps_gradients: bool = False
    """True if that call zeroes gradients in place (`set_to_none=False`), so that later steps hold them throughout."""
    own_checkpointing: OwnCheckpointing | None = None
    """The model's own checkpointing, as the recorded step showed it; None: a prediction, or an older file."""
    ran_as_written: bool = False
    """True if a recorded step called compiled code (torch.compile), which ran uncompiled."""
    ran_compiled: bool = False
    """True if a recorded step ran compiled code: its bytes are the allocator's, and no block has any of them."""
    failure: Failure | None = None
    free_memory_bytes: Count | None = None
    """Free bytes of the device after the steps; None: not reported."""
    card: CardMemory | None = None
    """What the card of the spec holds, by the rules of torch's allocator; None: the spec names no card."""
    refused: tuple[Refused, ...] = ()
    """Earlier runs of the same step that ran out of memory, the requested policy first."""

    @cached_property
    def by_fqn(self) -> dict[str, MeasuredBlock]:
        return {cost.fqn: cost for cost in self.blocks}

    @property
    def complete(self) -> bool:
        """True if the step ran to its end. A run that was cut short has no headline figures of a whole step."""
        return self.failure is None

    @property
    def failed_in(self) -> str:
        """The phase in which a run was cut short: `forward`, `the recompute of blocks.5`; empty if unknown or complete.

        The phase is that of the last allocation, because the code after an error only frees memory. A failure after
        the recorded step, while steps were timed, has no phase.
        """
        if self.complete or not self.allocations or any(span.phase == "optimizer" for span in self.phases):
            return ""
        last = max(self.allocations.born, default=0)
        span = next((span for span in self.phases if last < span.end_tick), None)
        if span is None:
            return ""
        return f"the recompute of {span.block}" if span.block else span.phase

    @cached_property
    def held_peak_bytes(self) -> int | None:
        """Most bytes held in the recording: the peak of a complete step, or a lower bound if the step was cut short."""
        return max(self.allocations.held_bytes) if self.allocations else None

    @property
    def step_peak_bytes(self) -> int | None:
        """Most bytes held at any tick of the whole step, parameters and optimizer state included."""
        return self.held_peak_bytes if self.complete else None

    @cached_property
    def saved_after_forward_bytes(self) -> int | None:
        """Saved activations alive when the (last) forward phase ends."""
        log, border = self.allocations, self.forward_end_tick
        if not self.complete or not log or border is None:
            return None
        saved = ROLES.index("saved activation")
        entries = zip(log.n_bytes, log.born, log.died, log.role)
        return sum(size for size, born, died, role in entries if role == saved and born <= border < died)

    @property
    def forward_end_tick(self) -> int | None:
        """Last tick of the last forward span; None: forward did not end."""
        ends = [span.end_tick - 1 for span in self.phases if span.phase == "forward"]
        return ends[-1] if ends else None

    @property
    def peak_phase(self) -> Phase | None:
        if not self.complete or not self.allocations:
            return None
        tick = self.allocations.peak_tick
        return next((span.phase for span in self.phases if span.first_tick <= tick < span.end_tick), None)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that all-gathers of the step return: parameters of FSDP2, each as often as it is gathered."""
        return sum(collective.n_bytes for collective in self.collectives if collective.kind == "all-gather")

    @property
    def forward_flops(self) -> int | None:
        return self._root_flops("forward_flops")

    @property
    def recompute_flops(self) -> int | None:
        return self._root_flops("recompute_flops")

    @property
    def backward_flops(self) -> int | None:
        return self._root_flops("backward_flops")

    @property
    def total_flops(self) -> int | None:
        parts = (self.forward_flops, self.recompute_flops, self.backward_flops)
        return None if None in parts else sum(part or 0 for part in parts)

    def _root_flops(self, field: str) -> int | None:
        root = self.by_fqn.get("")
        return None if root is None or not self.complete else int(getattr(root, field))

    @property
    def step_times(self) -> Samples:
        """Times of the whole step; empty if it was not timed, or was cut short."""
        return self.times.step if self.times and self.complete else Samples()

    @property
    def as_run(self) -> Measurement:
        """This run, as the fullest of several ranks has it."""
        return self

    def headlines(self) -> dict[str, int | float | str | None]:
        """The derived figures `--json` prints; a run that was cut short has only `held_peak_bytes` and `failed_in`."""
        return {
            "complete": self.complete,
            "failed_in": self.failed_in,
            "held_peak_bytes": self.held_peak_bytes,
            "step_peak_bytes": self.step_peak_bytes,
            "saved_after_forward_bytes": self.saved_after_forward_bytes,
            "peak_phase": self.peak_phase,
            "forward_flops": self.forward_flops,
            "recompute_flops": self.recompute_flops,
            "backward_flops": self.backward_flops,
            "step_ms": self.step_times.median_ms,
            "step_spread_ms": self.step_times.spread_ms,
            **(self.card.headlines() if self.card else self._allocator_headlines()),
        }

    def _allocator_headlines(self) -> dict[str, int | None]:
        """The figures of a measured GPU under the names of a predicted one; empty without a caching allocator."""
        peaks = self.peaks
        if peaks.reserved_peak_bytes is None:
            return {}
        return {
            "requested_bytes": peaks.requested_peak_bytes,
            "allocated_bytes": peaks.allocated_peak_bytes,
            "reserved_bytes": peaks.reserved_peak_bytes,
            "stranded_bytes": peaks.stranded_bytes,
            "refused_bytes": self.failure.asked_bytes if self.failure else None,
        }


class RecordedRanks(Record):
    """The same step on every rank that wrote a file. A rank that was not refused memory may have written none."""

    ranks: tuple[Measurement, ...]
    """Measurements in ascending order of `rank`."""
    n_ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    recorded_in: str
    """`train.py:42, step 2`: without the rank. Empty: the ranks of a spec."""
    equal: dict[int, int] = {}
    """Ranks that were not played, each with the rank of `ranks` that has the same shards."""

    @property
    def by_rank(self) -> dict[int, Measurement]:
        return {run.rank or 0: run for run in self.ranks}

    @property
    def fullest(self) -> Measurement:
        """The rank that held most."""
        return max(self.ranks, key=lambda run: run.held_peak_bytes or 0)

    @cached_property
    def as_run(self) -> Measurement:
        """The fullest rank as a run, under the name that all ranks share."""
        return replace(self.fullest, spec=self.spec)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a record, theirs or that of an equal rank."""
        return tuple(sorted(set(range(self.n_ranks)) - self.by_rank.keys() - self.equal.keys()))

    @property
    def spec(self) -> RunSpec:
        """The spec of the fullest rank, under the name that all share."""
        if not self.recorded_in:
            return self.fullest.spec
        return replace(self.fullest.spec, model=ModelRef(target=f"{RECORDED}{self.recorded_in}"))

    def headlines(self) -> dict[str, object]:
        """The derived figures of the list of runs: those of the fullest rank, by name."""
        run = self.fullest
        return {
            "n_ranks": self.n_ranks,
            "fullest_rank": run.rank,
            "complete": all(rank.complete for rank in self.ranks),
            "held_peak_bytes": run.held_peak_bytes,
            "step_peak_bytes": run.step_peak_bytes,
        }
