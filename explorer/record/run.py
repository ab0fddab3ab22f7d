"""Everything that decides what a run does: equal RunSpecs mean the same run.

A `RunSpec` names the model, the policy, the device and, for a pipeline, the split into stages and its schedule.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from explorer.record.base import MOST, MOST_RANKS, Count, Number, Record
from explorer.record.card import Card
from explorer.record.graph import Conditions, ModelRef
from explorer.record.policy import KEEP_ALL, Policy

CheckpointMode = Literal["always", "except_last", "never"]
"""The microbatches that are checkpointed, in torchgpipe's words and meaning."""

PipelineEngine = Literal["inproc", "procs", "torchrun", "replay"]
"""`replay` (each rank alone, with the figures of `inproc`) stands in files of earlier versions."""
OWN_SCHEDULE = "own schedule"
"""The schedule name of rows that a person wrote."""


DataParallel = Literal["fsdp", "ddp", "none"]


class Ranks(Record):
    """Processes that train one model together, each with its batch. Sizes of the mesh: data x tensor."""

    n_ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    data: DataParallel = "fsdp"
    """fsdp: `fully_shard` on each repeated block and on the whole. ddp: `DistributedDataParallel`."""
    reshard: bool = True
    """FSDP2's `reshard_after_forward`: False keeps gathered parameters until backward."""
    n_tensor: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    """Ranks that share each product of tensor parallelism, next to each other in the mesh."""
    parallelize: str = ""
    """`file.py:function` that splits the model: `function(model, mesh)`; empty: the plan that the model brings."""

    @property
    def n_data(self) -> int:
        """Ranks with batches of their own."""
        return self.n_ranks // self.n_tensor

    @property
    def in_words(self) -> str:
        """`8 ranks, FSDP2 x 4, tensor parallel x 2`."""
        data = {"fsdp": "FSDP2" if self.reshard else "FSDP2 without resharding", "ddp": "DDP", "none": "copies"}
        parts = [f"{data[self.data]} x {self.n_data}"] if self.n_data > 1 or self.data != "none" else []
        parts += [f"tensor parallel x {self.n_tensor}"] if self.n_tensor > 1 else []
        return ", ".join([f"{self.n_ranks} ranks" if self.n_ranks > 1 else "1 rank", *parts])


class PipelinePlan(Record):
    """Stages as lists of fqns, in execution order, and the schedule that drives them."""

    stages: tuple[tuple[str, ...], ...]
    n_microbatches: Annotated[int, Meta(ge=1, le=1024)]
    schedule: str = "GPipe"
    """torch's own strings: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV."""
    n_ranks: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """The number of ranks; None: one rank per stage, or two stages per rank for schedules that need several."""
    checkpoint: CheckpointMode = "always"
    """The checkpointed microbatches of the blocks that the policy recomputes, in train mode and in eval mode alike."""
    keyed_rng: bool = True
    """Dropout is seeded by (seed, block, microbatch), so that every split draws the same masks."""
    deferred_batch_norm: bool = False
    """Running statistics move once per batch instead of once per microbatch."""
    actions: tuple[tuple[str, ...], ...] = ()
    """An own schedule, one row of actions (`2F0`, `2B0`, `2I0`, `2W0`) a rank; empty: generated from `schedule`."""

    @property
    def schedule_name(self) -> str:
        """The name that readers see."""
        return OWN_SCHEDULE if self.actions else self.schedule


Device = Literal["cpu", "cuda"]
Optimizer = Literal["adamw", "sgd", "adamw8bit", "none"]
"""`adamw8bit`: moments in 8 bits, as in bitsandbytes. `none`: backward only, nothing is stepped."""
OptimizerForm = Literal["default", "for-loop", "foreach", "fused"]
"""How torch computes the optimizer's step: one parameter after the other, all at once, or in one kernel."""
N_REPEATS = 3
"""Timed steps by default."""

MOST_PROBES = 10_000


N_PROBES = 20
"""Shows an effect that begins within 21 calls of a block, and a history of up to 16 calls."""


class RunSpec(Conditions, kw_only=True):
    """A training step of a model under a policy."""

    model: ModelRef
    policy: Policy = KEEP_ALL
    plan: PipelinePlan | None = None
    device: Device = "cpu"
    seed: Annotated[int, Meta(ge=-MOST, le=MOST)] = 0
    forward_only: bool = False
    """Forward and loss without gradients: no backward, no optimizer, nothing to recompute."""
    optimizer: Optimizer = "adamw"
    optimizer_form: OptimizerForm = "default"
    """default: torch's choice, which is `foreach` on a GPU and `for-loop` on a CPU."""
    learning_rate: Number = 1e-3
    momentum: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Momentum; used by SGD only."""
    n_accumulation: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Microbatches whose gradients are added up before the one optimizer step; the batch is split along dimension 0."""
    n_repeats: Annotated[int, Meta(ge=0, le=1000)] = N_REPEATS
    """Timed steps, after the warm-up."""
    n_probes: Annotated[int, Meta(ge=0, le=MOST_PROBES)] = N_PROBES
    """Recomputes of each unit before a probed step; 0: no probe for hidden state."""
    n_threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    """CPU threads; pinned, because two threads round differently from one."""
    time_limit_s: Annotated[float, Meta(ge=0.0, le=1e7)] = 600.0
    card: Card | None = None
    """The GPU for which a step without data is predicted; None: the CPU."""
    holds_output: bool | None = None
    """Whether a variable holds what the model returned until the step is over; None: on a GPU it does."""
    ranks: Ranks | None = None
    """Processes that share the step by FSDP2, DDP or tensor parallelism; None: one process."""
    memory_limit_bytes: Count | None = None
    """Limit of the process (CPU) or of the device (CUDA); None: all memory of the machine."""

    @property
    def conditions(self) -> Conditions:
        """The options that decide what a forward saves."""
        return Conditions(**{name: getattr(self, name) for name in Conditions.__struct_fields__})

    @property
    def output_is_held(self) -> bool:
        """`holds_output`, or the default: on a GPU, predicted or measured, because most loops hold it."""
        on_gpu = self.card is not None or self.device == "cuda"
        return on_gpu if self.holds_output is None else self.holds_output


class RunOfSlice(Record):
    """A run of a kind that a slice adds. The slice prints it and writes its report."""

    spec: RunSpec

    def headlines(self) -> dict[str, object]:
        """The derived figures that `--json` prints beside the record."""
        return {}
