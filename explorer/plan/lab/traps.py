"""Traps: mostly of the older, reentrant checkpoint, and some that any checkpoint has."""

from __future__ import annotations

from explorer.plan.lab.switches import switch
from explorer.record.lab import Story, Theme

THEME: Theme = "Traps"

TRAPS: tuple[Story, ...] = (
    Story(
        name="no-grad-input",
        theme=THEME,
        title="An input that needs no gradient",
        question="Does a checkpointed block train when its input does not ask for a gradient?",
        paragraphs=(
            "The reentrant checkpoint is one operation in the graph. Autograd includes an operation only if one of its "
            "inputs needs a gradient, and a block's parameters are not inputs of that operation. So a block whose "
            "input is raw data, or comes from a frozen layer, drops out of the graph, parameters and all.",
            "The same net is run plainly, with the non-reentrant and with the reentrant checkpoint, with data as input "
            "or with an embedding in front that is frozen, as when only adapters are trained.",
        ),
        switches=(
            switch(
                "input",
                "What does the first block receive?",
                data="Data, which needs no gradient",
                asked="Data that was told to require a gradient",
                trained="The output of a trained layer",
            ),
            switch("blocks", "Which blocks are recomputed?", all="All three", first="The first only"),
        ),
        words=("reentrant", "non-reentrant", "gradient"),
    ),
    Story(
        name="gradient-penalty",
        theme=THEME,
        title="Differentiating through backward",
        question="Which checkpoint survives autograd.grad, a gradient penalty and a Hessian-vector product?",
        paragraphs=(
            "Some losses contain a gradient: penalties, physics-informed nets, influence functions. Backward itself "
            "must then be differentiable, and torch.autograd.grad must be able to ask for single gradients.",
            "Each way of differentiating is tried plainly, non-reentrant and reentrant, with all blocks recomputed or "
            "only one of them. An exception is the friendly outcome: it is the silent ones that cost weeks.",
        ),
        switches=(
            switch(
                "blocks", "Which blocks are recomputed?", all="All four", first="The first only", last="The last only"
            ),
        ),
        words=("gradient penalty", "Hessian-vector product", "reentrant", "non-reentrant", "relative distance"),
    ),
    Story(
        name="nested-skips",
        theme=THEME,
        title="Tensors inside tuples, and a process that may die",
        question="What can a checkpoint do to the program around it?",
        paragraphs=(
            "The reentrant checkpoint cuts tensors off from the graph only where they are direct arguments. A skip "
            "connection handed over inside a tuple stays connected, so the inner backward wanders out of its block and "
            "uses up parts of the graph that the outer backward still needs. Depending on the net that is an "
            "exception, a wrong gradient or a dead interpreter.",
            "So each run of this experiment has a process of its own. The last choice is another way to endanger it: a "
            "BatchNorm whose mode flips between forward and backward while torch's check is switched off, so that the "
            "rerun hands backward other tensors than it expects and nobody looks.",
        ),
        switches=(
            switch(
                "danger",
                "What does the block do?",
                tuple="Takes skip connections inside a tuple",
                arguments="Takes the same skip connections as direct arguments",
                flip="BatchNorm changes to eval mode before the rerun, unchecked",
            ),
        ),
        words=("reentrant", "non-reentrant", "gradient"),
    ),
    Story(
        name="early-stop",
        theme=THEME,
        title="Where a recompute ends",
        question="Which layers of a block really run again?",
        paragraphs=(
            "A recompute is there to bring back the saved tensors. When the last of them is back, there is no reason "
            "to go on, and torch leaves the block in the middle (early_stop). Layers behind that point run once, those "
            "before it twice.",
            "That is good for the cost and matters for anything that counts on both runs: hooks, counters, timers. The "
            "block here has four layers; each counts its own forwards. What its last layer saves decides where the "
            "rerun ends.",
        ),
        switches=(
            switch(
                "last",
                "What is the block's last layer?",
                linear="A linear layer (saves its input)",
                relu="ReLU (saves its output)",
                add="An addition of a bias (saves nothing)",
            ),
            switch("early_stop", "May the recompute end early?", on="Yes (torch's default)", off="No"),
        ),
        words=("early stop", "recompute", "saved activations"),
    ),
    Story(
        name="router-noise",
        theme=THEME,
        title="A router that changes its mind",
        question="What if the rerun sends tokens to other experts?",
        paragraphs=(
            "A mixture of experts sends each token to the expert with the best score, and noise on the scores keeps "
            "all experts busy. Without a snapshot the rerun draws other noise, and some tokens go to another expert "
            "than they did in forward.",
            "Now even shapes change: an expert may see seven tokens first and nine the second time. The non-reentrant "
            "checkpoint compares shapes and can refuse; the reentrant one compares nothing.",
        ),
        switches=(
            switch("preserve_rng_state", "Is the random state put back?", off="No", on="Yes (torch's default)"),
            switch("noise", "How strong is the noise?", strong="Strong", weak="Weak: a few tokens change their expert"),
        ),
        words=("expert", "RNG", "snapshot", "non-reentrant", "reentrant", "relative distance"),
    ),
)
