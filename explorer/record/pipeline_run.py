"""A pipelined step, run or simulated: actions in time, memory by rank, and causes of gradient differences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta

from explorer.record.base import MOST_RANKS, Column, Count, Number, Origin, Record, column
from explorer.record.comparison import BufferDiff, GradientDiff
from explorer.record.failure import Failure
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Environment
from explorer.record.run import PipelineEngine, RunSpec

ActionKind = Literal["F", "B", "I", "W"]
Index = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
"""Number of a rank or a stage."""
Share = Literal["microbatching", "recompute", "splitting"]


class ActionTime(Record):
    """An action on the clock of the whole step. Zero is the start of the step."""

    rank: Index
    stage: Index
    kind: ActionKind
    microbatch: Count
    start_ms: Number
    end_ms: Number
    recompute_ms: Number = 0.0
    """Part of the action in which blocks ran forward again."""

    @property
    def name(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


class RankMemory(Record):
    """Bytes held by one rank over the step: parameters, receive buffers, saved activations, gradients, temporaries."""

    rank: Index
    origin: Origin
    time_ns: Column
    """Time of each sample since the start of the step, ascending."""
    held_bytes: Column
    """All bytes held at each sample."""
    action: Column
    """Index into `actions` of the action under way at each sample; -1: none."""
    actions: tuple[str, ...]
    parameter_bytes: Count
    """Parameters and buffers of the rank's stages, held all the time."""
    receive_bytes: Count
    """Buffers for boundary tensors and their gradients: allocated before the first action, held to the end."""
    optimizer_bytes: Count = 0
    """State of the optimizer, held from its first step on: counted, and not included in held_bytes."""

    @cached_property
    def peak_index(self) -> int | None:
        """First sample with the most bytes held."""
        return self.held_bytes.index(max(self.held_bytes)) if self.held_bytes else None

    @property
    def peak_bytes(self) -> int | None:
        return None if self.peak_index is None else self.held_bytes[self.peak_index]

    @property
    def device_bytes(self) -> int | None:
        """Bytes on the device of the rank: the peak of forward and backward plus the state of the optimizer."""
        return None if self.peak_bytes is None else self.peak_bytes + self.optimizer_bytes

    @property
    def peak_action(self) -> str:
        """The action at the peak, such as `1B0`; empty if the peak lies outside every action."""
        index = -1 if self.peak_index is None else self.action[self.peak_index]
        return self.actions[index] if index >= 0 else ""


def fullest_bytes(memory: Sequence[RankMemory]) -> int | None:
    """Bytes of the fullest rank, state of the optimizer included; None if nothing was measured."""
    return max((rank.device_bytes for rank in memory if rank.device_bytes is not None), default=None)


class RankUse(Record):
    """Busy time of a rank, and its most microbatches that wait for backward."""

    rank: Index
    busy_ms: Number
    bubble_fraction: Number
    """Idle share of the rank's time, from the step's start to its end."""
    n_in_flight: Count
    """Most (stage, microbatch) pairs at one moment whose forward is done and whose backward is not."""


class PlayedSchedule(Record):
    """A simulated schedule without contention between ranks; `origin` says where the durations come from."""

    origin: Origin
    """measured: a reading of each action. predicted: sums of the profile's blocks. simulated: unit costs."""
    actions: tuple[ActionTime, ...]
    ranks: tuple[RankUse, ...]
    memory: tuple[RankMemory, ...] = ()
    critical_path: tuple[str, ...] = ()
    """Actions that wait only for each other, first to last. A shorter step needs a shorter action among them."""

    @cached_property
    def makespan_ms(self) -> float:
        return max((action.end_ms for action in self.actions), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Mean over ranks."""
        return sum(rank.bubble_fraction for rank in self.ranks) / len(self.ranks) if self.ranks else 0.0


class Stage(Record):
    """A stage of a run."""

    stage: Index
    rank: Index
    blocks: tuple[str, ...]
    parameter_bytes: Count
    receives: tuple[str, ...] = ()
    """Boundary tensors it receives, each as `producer shape dtype`."""
    receive_bytes: Count = 0
    """Received bytes per microbatch."""


class BlockCalls(Record):
    """Counts of forward calls of a block, for the whole batch."""

    fqn: str
    stage: Index
    n_forward: Count
    """Calls in forward, over all microbatches."""
    n_recompute: Count
    """Runs for backward, over all microbatches."""
    n_microbatches: Count

    @property
    def multiplier(self) -> float:
        """Runs per forward call: 1 if kept, 2 if recomputed once, more under a split backward."""
        return (self.n_forward + self.n_recompute) / self.n_forward if self.n_forward else 0.0


class RankReport(Record):
    """The results of one process of a real run. `failure` is set if the process ended early."""

    rank: Index
    actions: tuple[ActionTime, ...] = ()
    memory: RankMemory | None = None
    blocks: tuple[BlockCalls, ...] = ()
    losses: tuple[float, ...] = ()
    """Losses by microbatch, on the rank with the last stage."""
    device_name: str = ""
    failure: Failure | None = None
    failed_action: str = ""
    """The action in which the failure came, such as `1B0`."""
    run_key: str = ""
    """Key of the spec that the process ran (plan.export.torchrun.run_key)."""


class GradientShares(Record):
    """The gradient of a parameter over four runs, which assigns a difference to its cause.

    full batch ──microbatching──▶ microbatched ──recompute──▶ with the policy ──splitting──▶ pipelined
    """

    name: str
    stages: tuple[Index, ...]
    """Stages that hold the parameter; more than one: tied weights, whose gradients were summed."""
    microbatching: GradientDiff
    recompute: GradientDiff
    splitting: GradientDiff


class BufferShares(Record):
    """A buffer after the step, over the same runs, such as running statistics."""

    name: str
    microbatching: BufferDiff
    recompute: BufferDiff
    splitting: BufferDiff


class PipelineRun(Record):
    """A pipelined training step. If a rank failed, `failure` is set and `failed_rank` names the rank."""

    spec: RunSpec
    engine: PipelineEngine
    environment: Environment
    rows: tuple[tuple[str, ...], ...]
    """The action list that ran, one row a rank."""
    stages: tuple[Stage, ...] = ()
    actions: tuple[ActionTime, ...] = ()
    """Actions as the clock measured them; in one process the ranks take turns, see `composed`."""
    memory: tuple[RankMemory, ...] = ()
    blocks: tuple[BlockCalls, ...] = ()
    gradients: tuple[GradientShares, ...] = ()
    buffers: tuple[BufferShares, ...] = ()
    losses: tuple[float, ...] = ()
    """Losses by microbatch."""
    composed: PlayedSchedule | None = None
    """A simulation from the measured durations: each rank has its own machine, and links take no time."""
    wall: PlayedSchedule | None = None
    """Actions of concurrent ranks at the times of their clocks; gaps contain links and contention."""
    predicted: PlayedSchedule | None = None
    """The prediction from the profile; None: no profile was made."""
    notes: tuple[str, ...] = ()
    """Notes for the reader: measured on one device, tied weights, multiplied recompute, ..."""
    failure: Failure | None = None
    failed_rank: Index | None = None
    graph: ModelGraph | None = None
    """The same as `Measurement.graph`."""

    @property
    def n_splitting_equal(self) -> int:
        """Number of gradients that splitting left equal in every bit, of `len(gradients)`."""
        return sum(shares.splitting.bitwise for shares in self.gradients)

    @property
    def n_splitting_rounding(self) -> int:
        """Number of gradients that splitting moved only by rounding, compared with float64."""
        return sum(shares.splitting.verdict == "rounding" for shares in self.gradients)

    @property
    def moved(self) -> tuple[GradientShares, ...]:
        """Gradients that splitting lost, or moved by more than rounding. A correct run has none."""
        return tuple(shares for shares in self.gradients if shares.splitting.verdict == "different")

    @property
    def timing(self) -> PlayedSchedule | None:
        """The measured timing to show: clocks of concurrent ranks, or else the composed timing."""
        return self.wall or self.composed

    def headlines(self) -> dict[str, object]:
        """The derived figures `--json` prints beside the record, under these very names."""
        forecast = self.timing
        return {
            "makespan_ms": forecast.makespan_ms if forecast else None,
            "composed_makespan_ms": self.composed.makespan_ms if self.composed else None,
            "bubble_fraction": forecast.bubble_fraction if forecast else None,
            "rank_peak_bytes": [memory.peak_bytes for memory in self.memory],
            "rank_peak_actions": [memory.peak_action for memory in self.memory],
            "rank_optimizer_bytes": [memory.optimizer_bytes for memory in self.memory],
            "n_splitting_equal": self.n_splitting_equal,
            "n_splitting_rounding": self.n_splitting_rounding,
            "n_splitting_different": len(self.moved),
            "n_gradients": len(self.gradients),
            "highest_multiplier": max((block.multiplier for block in self.blocks), default=None),
            "predicted_makespan_ms": self.predicted.makespan_ms if self.predicted else None,
            "predicted_rank_peak_bytes": [m.peak_bytes for m in self.predicted.memory] if self.predicted else None,
        }


def rank_memory(rank: int, origin: Origin, samples: Sequence[tuple[int, int, str]], **fixed: int) -> RankMemory:
    """Columns from `(time_ns, held_bytes, action name or "")`; `fixed` are parameter_bytes and receive_bytes."""
    names = tuple(dict.fromkeys(name for _, _, name in samples if name))
    index = {name: k for k, name in enumerate(names)}
    return RankMemory(
        rank=rank,
        origin=origin,
        time_ns=column(time for time, _, _ in samples),
        held_bytes=column(n_bytes for _, n_bytes, _ in samples),
        action=column(index.get(name, -1) for _, _, name in samples),
        actions=names,
        **fixed,
    )
