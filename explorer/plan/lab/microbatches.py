"""Microbatches and second order: what checkpointing changes in a pipeline, and what microbatching itself changes."""

from __future__ import annotations

from explorer.plan.lab.switches import counts, switch
from explorer.record.lab import Story, Theme

THEME: Theme = "Microbatches and second order"

MICROBATCHES: tuple[Story, ...] = (
    Story(
        name="second-order",
        theme=THEME,
        title="The riddle of the wrong Hessian",
        question="First-order gradients are right. Why is the Hessian-vector product wrong, and only sometimes?",
        paragraphs=(
            "A pipeline cuts the batch into microbatches and checkpoints always, except_last or never. Its checkpoint "
            "is reentrant: the block becomes one operation whose backward runs an inner backward. A gradient that "
            "comes out of an inner backward is a plain number, with no graph behind it.",
            "A Hessian-vector product differentiates the gradient. Here the gradient is taken with a graph "
            "(create_graph=True) and differentiated again. The reentrant checkpoint is a small one of the lab's own "
            "that follows the pipeline's rules: the last microbatch is exempt under except_last, and in eval mode "
            "nothing is checkpointed at all. The number of checkpointed microbatches is counted, not assumed.",
        ),
        switches=(
            switch(
                "checkpoint",
                "How are microbatches checkpointed?",
                pipeline="The pipeline's way (reentrant)",
                torch="torch's non-reentrant checkpoint",
            ),
            counts("microbatches", "How many microbatches?", 2, 1, 4),
            switch("mode", "In which mode is the model?", train="train", eval="eval"),
        ),
        words=(
            "microbatch",
            "always / except_last / never",
            "Hessian-vector product",
            "reentrant",
            "non-reentrant",
            "relative distance",
        ),
    ),
    Story(
        name="microbatching",
        theme=THEME,
        title="Microbatching is not checkpointing",
        question="A split and checkpointed run differs from the plain one. Who is to blame?",
        paragraphs=(
            "Pipelines and gradient accumulation cut the batch into microbatches; checkpointing usually comes along. "
            "When the result differs from the full batch, checkpointing is easily blamed.",
            "Three runs tell them apart: the full batch, microbatches without recompute, and microbatches with "
            "recompute. BatchNorm normalises with the numbers of its own microbatch, and dropout draws its masks in "
            "another order. Neither has anything to do with recomputing. Microbatch gradients are weighted by size, so "
            "uneven ones count fairly.",
        ),
        switches=(
            switch(
                "layer",
                "What is in the blocks?",
                batchnorm="BatchNorm",
                dropout="Dropout",
                layernorm="LayerNorm",
                plain="Linear layers only",
            ),
            counts("microbatches", "How many microbatches?", 4, 2, 3),
        ),
        words=("microbatch", "recompute", "running statistics", "mask", "rounding", "cosine"),
    ),
)
