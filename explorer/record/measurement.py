"""What one training step did: every allocation with its role and block, phases, FLOPs, times. Headlines are derived."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from msgspec import Meta

from explorer.record.allocations import ROLES, Allocations, Phase, PhaseSpan
from explorer.record.base import MOST_RANKS, Column, Count, Number, Origin, Record
from explorer.record.failure import Failure
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from explorer.record.times import Samples, Times


class Environment(Record):
    """Where it ran."""

    device: str
    """`cpu` or `cuda`."""
    device_name: str
    torch_version: str
    python_version: str
    platform: str
    n_threads: Count
    total_memory_bytes: Count | None = None
    cuda_version: str = ""
    """CUDA only, like all that follow: what torch was built with."""
    cudnn_version: str = ""
    driver_version: str = ""
    tf32: tuple[str, ...] = ()
    """Kinds of operators that could use TensorFloat-32: `convolutions`, `recurrent layers`, `matrix products`."""
    allocator_settings: str = ""
    """What the environment told torch's caching allocator."""


class SavedFile(Record):
    """A file that the worker wrote."""

    path: str
    n_bytes: Count


class AllocatorPeaks(Record):
    """The allocator's own words for the measured step, beside what the timeline says. None: not measured here."""

    alone_peak_bytes: Count | None = None
    """Peak of the same step seen by the allocator alone, without the tracker."""
    tracker_peak_bytes: Count | None = None
    """Peak of the storages the tracker saw: what is missing is inside kernels."""
    requested_peak_bytes: Count | None = None
    """CUDA only, like the next two: the allocator's counters. This one is the drawn peak, to the byte."""
    allocated_peak_bytes: Count | None = None
    reserved_peak_bytes: Count | None = None
    steady_reserved_peak_bytes: Count | None = None
    """Reserved peak of the same step once the cache is warm, as every later step of a training finds it: what has to
    be free on the GPU. `reserved_peak_bytes` is that of a step that began with an empty cache."""
    offloaded_peak_bytes: Count | None = None
    """Most bytes that `offload` held in pinned memory of the host during the measured step; None: nothing offloads."""
    allocated: Column | None = None
    """CUDA only: allocated bytes at each tick, derived: requests rounded up to 512 bytes, hung up at the allocator's
    own counter after the step. Blocks may be larger, so this is a lower bound; `allocated_peak_bytes` is measured.
    """
    reserved: Column | None = None
    """CUDA only: reserved bytes at each tick, measured: the sum of the segments taken from the driver."""


class MeasuredBlock(Record):
    """What one block did in the measured step; sums over all its calls, everything below included."""

    fqn: str
    n_forward: Count
    """Forward calls in the forward phase."""
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
    """Tensors that autograd was handed to keep in that forward, parameters and repeated ones included; None: not
    counted."""


class Refused(Record):
    """A run that was out of memory, before one that fits was found."""

    what: str
    """In words: `everything kept`, `every block recomputed`."""
    policy: Policy
    held_peak_bytes: Count | None
    """It needs at least so much. None: refused before anything was recorded."""
    failed_in: str
    """As in Measurement."""


class Measurement(Record):
    """One measured step. `failure` is set when it was cut short; what was recorded until then is kept."""

    spec: RunSpec
    environment: Environment
    origin: Origin = "measured"
    """predicted: put together from other runs, see plan/forecast/keep_all.py and any_size.py; it has no times."""
    allocations: Allocations | None = None
    phases: tuple[PhaseSpan, ...] = ()
    peaks: AllocatorPeaks = AllocatorPeaks()
    blocks: tuple[MeasuredBlock, ...] = ()
    times: Times | None = None
    uncounted_ops: dict[str, Count] = {}
    """Calls of operators that do arithmetic as a matrix product does and have no formula: FLOPs leave them out."""
    recorded_in: str = ""
    """Where the step of origin `recorded` stands: `train.py:42`."""
    rank: Annotated[int, Meta(ge=0, lt=MOST_RANKS)] | None = None
    """Number of the process that recorded it, and how many there were; None: it ran alone."""
    n_ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)] | None = None
    graph: ModelGraph | None = None
    """Of the model, where it was described before the run: a report takes it from here and loads no model. None: not
    described. A recorded step always has its own."""
    dtype: str = ""
    """Types of the parameters that ran, the one with the most numbers first: `float32`, `bfloat16, float32`."""
    loss: float | None = None
    warnings: tuple[str, ...] = ()
    """What torch or the model said during the step."""
    ran_as_written: bool = False
    """Of origin `recorded`: compiled code (torch.compile) was called, and ran as its source is written."""
    failure: Failure | None = None
    free_memory_bytes: Count | None = None
    """What the device could still have given behind the steps; None: nobody said."""
    refused: tuple[Refused, ...] = ()
    """Runs of the same step that were out of memory before this one fitted, the one that was asked for first."""

    @cached_property
    def by_fqn(self) -> dict[str, MeasuredBlock]:
        return {cost.fqn: cost for cost in self.blocks}

    @property
    def complete(self) -> bool:
        """Whether the step ran to its end. A run that was cut short has no headline figure that could look whole."""
        return self.failure is None

    @property
    def failed_in(self) -> str:
        """Where a run was cut short: `forward`, `the recompute of blocks.5`; empty: not known, or it was not.

        That is where the last allocation was made: what unwinds behind an error only frees. A failure behind the
        recorded step, while steps were timed, has no place.
        """
        if self.complete or not self.allocations or any(span.phase == "optimizer" for span in self.phases):
            return ""
        last = max(self.allocations.born, default=0)
        span = next((span for span in self.phases if last < span.end_tick), None)
        return "" if span is None else f"the recompute of {span.block}" if span.block else span.phase

    @cached_property
    def held_peak_bytes(self) -> int | None:
        """Most bytes held while it was recorded: the peak of a complete step, at least so much of one cut short."""
        return max(self.allocations.held_bytes) if self.allocations else None

    @property
    def step_peak_bytes(self) -> int | None:
        """Most bytes held at any tick of the whole step, parameters and optimizer state included."""
        return self.held_peak_bytes if self.complete else None

    @cached_property
    def saved_after_forward_bytes(self) -> int | None:
        """Saved activations alive when the (last) forward phase ends."""
        if not self.complete or not self.allocations or (border := self.forward_end_tick) is None:
            return None
        saved = ROLES.index("saved activation")
        log = self.allocations
        return sum(
            size
            for size, born, died, role in zip(log.n_bytes, log.born, log.died, log.role)
            if role == saved and born <= border < died
        )

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

    def headlines(self) -> dict[str, int | float | str | None]:
        """The derived figures `--json` prints beside the record, under these very names.

        Of a run that was cut short only `held_peak_bytes` and `failed_in` say something.
        """
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
            "step_ms": self.times.step.median_ms if self.times and self.complete else None,
            "step_spread_ms": self.times.step.spread_ms if self.times and self.complete else None,
        }
