"""What blocks and stages of a pipeline cost: the price list that a prediction adds up."""

from __future__ import annotations

from explorer.record.base import Record
from explorer.record.measurement import Environment
from explorer.record.run import RunSpec


class LastBlock(Record):
    """A backward in two of the last block of a stage: its gradient came into a buffer, and no block behind it holds
    its graph. Fields as in SplitCost."""

    input_extra_bytes: int
    held_bytes: int
    """Held above entry while I goes on in the blocks before it; when I ends, the part that W can do without goes."""
    owed_bytes: int
    weight_extra_bytes: int
    first_weight_extra_bytes: int


class SplitCost(Record):
    """A backward in two actions, as zero-bubble schedules run it: I for the input's gradient, W later for the weights'.

    I keeps the graph for W. W runs a non-reentrant checkpoint again for every group of parameters, and what a group
    does not read of it stays until the last group is done.
    """

    input_ms: float
    """Recompute included, as in weight_ms."""
    weight_ms: float
    input_recompute_ms: float = 0.0
    weight_recompute_ms: float = 0.0
    weight_ms_per_block: float = 0.0
    """More in W for every block before it in its stage: each group of parameters walks the graph down to the input."""
    input_extra_bytes: int = 0
    """Highest above entry during I."""
    owed_bytes: int = 0
    """Held above entry after I, the gradient that is sent left out: what only W frees."""
    weight_extra_bytes: int = 0
    """Highest above entry during a W that finds gradients to add to."""
    first_weight_extra_bytes: int = 0
    """Highest above entry during the first W, which makes the parameters' gradients."""
    weight_end_bytes: int = 0
    """Held above entry after W while the graph still stands, as it does until the stage's last block is done."""
    last: LastBlock | None = None
    """At the end of a stage; None: as inside of one."""


class ActionCost(Record):
    """What one microbatch costs in one stage or block."""

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
    """What the gradients that it sends hold: a view holds all that it is a view of. None: as much as was received."""
    split: SplitCost | None = None
    """The same backward in two; None: not measured (a model's first stretch is never split, and torch may lack it)."""


class BlockCost(Record):
    """Consecutive blocks between two legal cuts, measured as a stage of their own."""

    blocks: tuple[str, ...]
    kept: ActionCost
    recomputed: ActionCost
    """The same with every block of them recomputed."""
    parameter_bytes: int
    gradient_bytes: int
    output_bytes: int
    """What crosses the cut behind them, per microbatch; 0 behind the last."""
    passed_bytes: int = 0
    """Part of output_bytes that came in and goes on as it is: skips on their way, no bytes of these blocks."""
    chosen: ActionCost | None = None
    """The same under the policy's own way with it, where that is neither: save_ops, offload. None: not measured."""
    returned_bytes: int = 0
    """What it hands on or, behind the last cut, returns: a stage that ends here holds it to the end of the
    microbatch's backward."""
    loss_bytes: int = 0
    """Behind the last cut: part of saved_bytes that the loss keeps until the step ends."""


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
    """Times without the overhead of a stage of their own."""
    overhead: StageOverhead = StageOverhead()


class StageCost(Record):
    """What one microbatch costs in one stage, kept or under the policy, and what the stage holds all along."""

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
    """Part of what it sends per microbatch that it received, and sends on as it is."""
    loss_bytes: int = 0
    """What the loss of each microbatch keeps until the step ends; 0 but for the last stage."""
