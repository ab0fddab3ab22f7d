"""The split of a step over ranks, and the collectives of one rank's step.

Apart from run.py, because a pipeline's split into stages (`PipelinePlan`) is another one with engines of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from explorer.record.allocations import Phase
from explorer.record.base import MOST_RANKS, Count, Record

DataParallel = Literal["fsdp", "ddp", "none"]
CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "broadcast", "all-to-all", "point to point"]


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


class Collective(Record):
    """A call of torch.distributed in the step of one rank."""

    kind: CollectiveKind
    n_bytes: Count
    """The whole tensor: what an all-gather returns, what a reduce-scatter or all-reduce is called with."""
    n_ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    block: str
    """The unit of FSDP2 that it belongs to, else the innermost running block."""
    phase: Phase
    tick: Count
    """Last tick of the timeline before the call."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends by the ring algorithm: (n - 1) / n of the tensor, an all-reduce twice as much."""
        if self.kind in ("broadcast", "point to point"):
            return self.n_bytes
        return self.n_bytes * (self.n_ranks - 1) // self.n_ranks * (2 if self.kind == "all-reduce" else 1)
