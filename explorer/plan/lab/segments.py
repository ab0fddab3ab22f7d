"""Segments and gradient stores: checkpointing in a framework that returns gradients as a table."""

from __future__ import annotations

from explorer.plan.lab.switches import counts, switch
from explorer.record.lab import Story, Theme

THEME: Theme = "Segments and gradient stores"

SEGMENTS: tuple[Story, ...] = (
    Story(
        name="gradient-stores",
        theme=THEME,
        title="Merging gradient stores",
        question="Every segment returns its own table of gradients. How do they become one?",
        paragraphs=(
            "Without hooks in autograd one can still checkpoint: run the net segment by segment, keep only the "
            "borders, then go backward segment by segment, running each one again. Each backward returns a store, a "
            "table from parameter names to gradients.",
            "In a net whose segments share weights, the same name appears in several stores. Three merges are tried: "
            "adding, overwriting (what extending one table by another does), and adding whole stores up afterwards. "
            "The last two sums differ in their order, and floating-point sums depend on order.",
        ),
        switches=(
            switch(
                "net",
                "Do the segments share weights?",
                recurrent="Yes: a recurrent net uses one cell at every step",
                chain="No: a chain of blocks with weights of their own",
            ),
            counts("segments", "How many segments?", 4, 2, 12),
        ),
        words=("segment", "store", "gradient", "bitwise equal", "rounding", "cosine"),
    ),
    Story(
        name="stepping",
        theme=THEME,
        title="One optimizer step, or one for each store",
        question="May the optimizer step on each segment's store instead of on the merged one?",
        paragraphs=(
            "Instead of merging the stores, one could hand them to the optimizer one after the other. For plain SGD a "
            "step on a + b is a step on a and then on b. Momentum and Adam remember past gradients, and weight decay "
            "shrinks weights at every step, so for them two small steps may not be one big one.",
            "Both runs start from the same weights and see the same batches, in float64 so that rounding stays out of "
            "the picture. The chart shows how far their weights drift apart.",
        ),
        switches=(
            switch(
                "optimizer",
                "Which optimizer?",
                adam="Adam",
                sgd="SGD",
                momentum="SGD with momentum 0.9",
                decay="SGD with weight decay 0.1",
            ),
            counts("segments", "How many segments?", 4, 2, 1),
        ),
        words=("store", "segment", "gradient", "relative distance"),
    ),
    Story(
        name="segment-memory",
        theme=THEME,
        title="Memory of one store and of many",
        question="How much memory does a segmented step need, and what does a list of stores add?",
        paragraphs=(
            "The plain run keeps the saved activations of every step. A segmented run keeps the borders between "
            "segments, and the saved activations of one segment at a time. Few segments are long; many segments have "
            "many borders. Somewhere between lies the least.",
            "A list of stores keeps the gradient of a shared weight once for every segment. The allocator's own events "
            "are added up to a peak for each variant, together with torch's checkpoint of the same segments.",
        ),
        switches=(
            counts("length", "How long is the sequence?", 32, 16, 64),
            switch(
                "batch",
                "What is large?",
                large="The batch: activations dominate",
                small="The weights: gradients dominate",
            ),
        ),
        words=("saved activations", "segment", "store", "recompute"),
    ),
)
