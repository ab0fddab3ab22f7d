"""Costs of blocks and stages of a pipeline: the price list that a prediction adds up."""

from __future__ import annotations

from explorer.record.base import Record
from explorer.record.measurement import Environment
from explorer.record.run import RunSpec


class LastBlock(Record):
    """A split backward of the last block of a stage: its gradient was received, and no later block holds its graph.
    Fields as in SplitCost."""

    input_extra_bytes: int
    held_bytes: int
    """Held above entry while I runs in the blocks before it. When I ends, the bytes that W does not need are freed."""
    owed_bytes: int
    weight_extra_bytes: int
    first_weight_extra_bytes: int


class SplitCost(Record):
    """A split backward, as in zero-bubble schedules: I for the input's gradient, W later for the weights' gradients.

    I keeps the graph for W. W runs a non-reentrant checkpoint again for every group of parameters. Tensors that a
    group does not read stay until the last group is done.
    """

    input_ms: float
    """Recompute included, as in weight_ms."""
    weight_ms: float
    input_recompute_ms: float = 0.0
    weight_recompute_ms: float = 0.0
    weight_ms_per_block: float = 0.0
    """Extra time of W per earlier block of the stage: each group of parameters walks the graph down to the input."""
    input_extra_bytes: int = 0
    """Highest above entry during I."""
    owed_bytes: int = 0
    """Held above entry after I, without the sent gradient: bytes that only W frees."""
    weight_extra_bytes: int = 0
    """Highest above entry during a W that finds gradients to add to."""
    first_weight_extra_bytes: int = 0
    """Highest above entry during the first W, which makes the parameters' gradients."""
    weight_end_bytes: int = 0
    """Held above entry after W while the graph lives, which is until the last block of the stage is done."""
    last: LastBlock | None = None
    """Costs as the last block of a stage; None: the same as inside a stage."""


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
    split: SplitCost | None = None
    """The same backward in two; None: not measured (a model's first stretch is never split, and torch may lack it)."""


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
    input_ms: float = 0.0


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
