"""Wrapped blocks: walk the model, make chosen blocks recompute, and see what that keeps and what it costs."""

from __future__ import annotations

from explorer.plan.lab.switches import counts, switch
from explorer.record.lab import Story, Theme

THEME: Theme = "Wrapped blocks"

BLOCKS: tuple[Story, ...] = (
    Story(
        name="wrap-in-place",
        theme=THEME,
        title="Wrap a block without renaming it",
        question="After a block was made to recompute, is it still the same model for everybody else?",
        paragraphs=(
            "To checkpoint a block, something has to stand between the caller and the block's forward. There are three "
            "usual places: a bound function put on the block itself (what this explorer does), a wrapper module put in "
            "the block's place, and a small function that remembers the old forward (a closure).",
            "Other code looks at the model too: optimizers and saved weights go by parameter names, type checks ask "
            "for the block's class, and training tools copy models. Each way is tried on the same net and asked the "
            "same four questions; the gradient is compared as well.",
        ),
        switches=(
            switch(
                "printed",
                "Which wrapped model to print?",
                in_place="The block's own forward, replaced in place",
                wrapper="A wrapper module in the block's place",
                closure="A closure over the old forward",
            ),
        ),
        words=("recompute", "gradient", "bitwise equal"),
    ),
    Story(
        name="extra-forward",
        theme=THEME,
        title="The price: about one more forward",
        question="How much more arithmetic does a step cost when blocks are recomputed?",
        paragraphs=(
            "A linear layer costs one matrix product forward and two backward (one for its input, one for its weight). "
            "A recomputed block pays its forward again. So recomputing everything should cost about a third more.",
            "Here every operation is counted, not timed. Watch where a rerun ends: backward never asks for a block's "
            "own output, so torch stops as soon as it has what backward needs, unless told otherwise.",
        ),
        switches=(
            switch(
                "blocks",
                "Which blocks are recomputed?",
                all="All eight",
                second="Every second one",
                nested="All eight, inside two recomputed halves",
            ),
            switch("early_stop", "May a recompute end early?", on="Yes (torch's default)", off="No, run to the end"),
        ),
        words=("FLOPs", "recompute", "early stop"),
    ),
    Story(
        name="batchnorm",
        theme=THEME,
        title="BatchNorm counts every batch twice",
        question="What does a second forward do to running statistics, and which cure is exact?",
        paragraphs=(
            "In training, BatchNorm normalises with the batch at hand and also keeps a moving average for later, when "
            "the model is used. A recomputed block runs its forward twice a step, so the average moves twice. The loss "
            "and the gradients of this step do not notice: they use the batch's own numbers.",
            "Two cures are compared. The momentum trick makes each update smaller, so that two small ones reach about "
            "as far as one. The explorer's cure lets the second forward write into copies that are thrown away.",
        ),
        switches=(
            counts("steps", "How many training steps?", 10, 1, 40),
            switch("blocks", "Which blocks are recomputed?", all="All four", half="The first two of four"),
            switch(
                "momentum",
                "How fast does the average move?",
                _0_1="momentum 0.1 (the default)",
                _0_5="momentum 0.5",
            ),
        ),
        words=("running statistics", "recompute", "bitwise equal", "relative distance"),
    ),
    Story(
        name="asking-layer",
        theme=THEME,
        title="A layer that asks whether it runs again",
        question="Can a layer that counts its own forwards be checkpointed?",
        paragraphs=(
            "Some layers change a little with every forward: a warm-up counter, a moving average, a codebook that "
            "learns. The layer here scales its output by 1 / (1 + number of forwards so far). Recomputed, it counts "
            "twice and scales differently the second time, so backward sees other numbers than forward did.",
            "explorer.is_recomputing() tells a layer that this forward is a rerun. A layer that asks can skip the "
            "counting and use the value that the first forward used.",
        ),
        switches=(
            switch(
                "asks",
                "Does the layer ask?",
                no="No, it counts every forward",
                yes="Yes, it counts first forwards only",
            ),
            counts("steps", "How many training steps?", 5, 1, 20),
        ),
        words=("recompute", "gradient", "relative distance", "cosine"),
    ),
    Story(
        name="mode-flip",
        theme=THEME,
        title="eval() between forward and backward",
        question="What if the model's mode changes before the block runs again?",
        paragraphs=(
            "A training loop may switch to eval mode to log something before it calls backward. For an ordinary model "
            "that is harmless: forward is over. A recomputed block has its second forward still to come, and that one "
            "now runs in eval mode: no dropout, other statistics.",
            "torch can compare shapes and number of the recomputed tensors with those of the first forward "
            "(determinism_check) and refuse. Whether that notices anything depends on what changed.",
        ),
        switches=(
            switch("layer", "Which layer minds the mode?", dropout="Dropout", batchnorm="BatchNorm"),
            switch("flip", "When is eval() called?", between="Between forward and backward", never="Not at all"),
        ),
        words=("non-reentrant", "reentrant", "recompute", "cosine", "relative distance"),
    ),
    Story(
        name="pullback-twice",
        theme=THEME,
        title="Calling the pullback twice",
        question="Does a second backward through the same forward give the same gradient, and what does it cost?",
        paragraphs=(
            "Backward is a function, and a function can be called twice: retain_graph=True asks torch to keep what it "
            "needs for that. A checkpointed block kept nothing, so it has to run again for each call.",
            "With dropout inside, the rerun must draw the very mask of the first forward both times. The experiment "
            "calls backward twice, compares both gradients with the plain ones, and counts how often the block ran.",
        ),
        switches=(
            switch("retain_graph", "Is the graph kept after the first call?", yes="Yes", no="No"),
            switch("dropout", "Is there dropout in the blocks?", yes="Yes, 30 %", no="No"),
        ),
        words=("pullback", "recompute", "non-reentrant", "reentrant", "bitwise equal"),
    ),
)
