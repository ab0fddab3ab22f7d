"""A pipelined step: actions in time, memory by rank, causes of gradient differences, and prices of blocks and stages.

`PipelineRun` is the document of a run, `PipelineProfile` the price list that a prediction adds up.
"""

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
from explorer.record.policy import Policy
from explorer.record.run import PipelineEngine, PipelinePlan, RunOfSlice, RunSpec

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
    action: Column
    """Index into `actions` of the action under way at each sample; -1: none."""
    actions: tuple[str, ...]
    parameter_bytes: Count
    """Parameters and buffers of the rank's stages, held all the time."""
    receive_bytes: Count
    """Buffers for boundary tensors and their gradients: allocated before the first action, held to the end."""
    optimizer_bytes: Count = 0
    """State of the optimizer, held from its first step on: counted, and not included in held_bytes."""

    @classmethod
    def of(cls, rank: int, origin: Origin, samples: Sequence[tuple[int, int, str]], **fixed: int) -> RankMemory:
        """Columns from `(time_ns, held_bytes, action name or "")`; `fixed` are parameter_bytes and receive_bytes."""
        times, sizes, actions = zip(*samples) if samples else ((), (), ())
        names = tuple(dict.fromkeys(filter(None, actions)))
        index = {name: k for k, name in enumerate(names)}
        return cls(
            rank=rank,
            origin=origin,
            time_ns=column(times),
            held_bytes=column(sizes),
            action=column(index.get(name, -1) for name in actions),
            actions=names,
            **fixed,
        )

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
    n_recompute: Count
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
    """Key of the spec that the process ran (run_key of plan/export.py)."""


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


class PipelineRun(RunOfSlice):
    """A pipelined training step. If a rank failed, `failure` is set and `failed_rank` names the rank."""

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
    def fullest_bytes(self) -> int | None:
        """Bytes of the fullest rank, state of the optimizer included; None if nothing was measured."""
        return max((rank.device_bytes for rank in self.memory if rank.device_bytes is not None), default=None)

    @property
    def n_splitting_equal(self) -> int:
        """Number of gradients that splitting left equal in every bit, of `len(gradients)`."""
        return sum(shares.splitting.bitwise for shares in self.gradients)

    @property
    def n_splitting_rounding(self) -> int:
        """Number of gradients that splitting moved by rounding alone."""
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
        timing = self.timing
        return {
            "makespan_ms": timing.makespan_ms if timing else None,
            "composed_makespan_ms": self.composed.makespan_ms if self.composed else None,
            "bubble_fraction": timing.bubble_fraction if timing else None,
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


class ActionCost(Record):
    """Cost of one microbatch in one stage or block."""

    forward_ms: float
    backward_ms: float
    """Recompute included."""
    recompute_ms: float = 0.0
    """Part of backward_ms."""
    saved_bytes: int = 0
    """Held from the end of forward to the end of backward, output included."""
    forward_extra_bytes: int = 0
    """Highest above entry during forward."""
    backward_extra_bytes: int = 0
    """Highest above entry during a backward that finds gradients to add to."""
    first_backward_extra_bytes: int = 0
    """Highest above entry during the first backward, which makes the parameters' gradients."""
    sent_gradient_bytes: int | None = None
    """Bytes held by the sent gradients; a view holds its whole base. None: as many bytes as were received."""


class BlockCost(Record):
    """Consecutive blocks between two legal cuts, measured as a stage."""

    blocks: tuple[str, ...]
    kept: ActionCost
    recomputed: ActionCost
    """The cost with all blocks recomputed."""
    parameter_bytes: int
    gradient_bytes: int
    output_bytes: int
    """Bytes that cross the cut after the blocks, per microbatch; 0 after the last block."""
    passed_bytes: int = 0
    """Part of output_bytes that was received and is sent on unchanged: skips, not made by the blocks."""
    chosen: ActionCost | None = None
    """The cost under another action of the policy: save_ops or offload. None: not measured."""
    returned_bytes: int = 0
    """Bytes sent to the next stage or, after the last cut, returned. A stage that ends here holds these bytes to the
    end of the microbatch's backward."""
    loss_bytes: int = 0
    """Part of saved_bytes that the loss keeps until the step ends; 0 before the last cut."""


class StageOverhead(Record):
    """Part of an action's time that a stage pays once, however many blocks it holds: boundaries, Python, the engine."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0


class PipelineProfile(Record):
    """The price list that predictions are made from: one microbatch of `n_rows` rows through every block."""

    spec: RunSpec
    environment: Environment
    n_rows: int
    batch_rows: int
    """Rows of the whole batch."""
    blocks: tuple[BlockCost, ...]
    """Costs of the blocks; times exclude the overhead of a stage."""
    overhead: StageOverhead = StageOverhead()


class StageCost(Record):
    """Cost of one microbatch in one stage, kept or under the policy, and bytes that the stage always holds."""

    stage: int
    kept: ActionCost
    recomputed: ActionCost
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    receive_bytes: int = 0
    """Boundary tensors it receives per microbatch; 0 for the first stage."""
    gradient_receive_bytes: int = 0
    """Gradients it receives per microbatch; 0 for the last stage."""
    passed_bytes: int = 0
    """Part of the sent bytes per microbatch that was received and is sent on unchanged."""
    loss_bytes: int = 0
    """Bytes that the loss of each microbatch keeps until the step ends; 0 except in the last stage."""


class CapWish(Record):
    """A pipeline that keeps every rank below a cap: what is fixed, and what may be chosen."""

    asked: PipelinePlan
    """The number of stages, ranks, schedule and switches; the blocks of its stages say nothing."""
    cap_bytes: int
    n_microbatches: int | None = None
    """The number of microbatches; None: the best number."""


class JointPlan(Record):
    """Cuts, microbatches and policy of a pipeline chosen together, so that every rank stays below a cap."""

    plan: PipelinePlan
    policy: Policy
    cap_bytes: int
    makespan_ms: float
    """Step time in milliseconds; all figures of the record are predicted."""
    rank_bytes: tuple[int, ...]
    """Bytes on the device of each rank: its peak and the state of the optimizer."""
    n_judged: int
    """Number of plans whose step was simulated."""
