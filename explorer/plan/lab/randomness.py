"""Wrapped blocks that draw random numbers: what has to be put back before they run again."""

from __future__ import annotations

from explorer.plan.lab.switches import switch
from explorer.record.lab import Story, Theme

THEME: Theme = "Wrapped blocks"

RANDOMNESS: tuple[Story, ...] = (
    Story(
        name="dropout",
        theme=THEME,
        title="Dropout must draw the same mask again",
        question="What happens when a recomputed block draws new random numbers?",
        paragraphs=(
            "Dropout throws away a random part of its input. A recomputed block draws its mask a second time, and "
            "backward believes that this is the mask forward used. If it is another mask, the gradient belongs to a "
            "net that never ran.",
            "torch therefore takes a snapshot of the random generator before each block and puts it back for the rerun "
            "(preserve_rng_state). Run without it first, then with it, and compare masks, gradients and loss.",
        ),
        switches=(
            switch("preserve_rng_state", "Is the snapshot taken?", off="No", on="Yes (torch's default)"),
            switch("p", "How much is dropped?", _0_3="30 %", _0_1="10 %", _0_5="50 %"),
        ),
        words=("mask", "snapshot", "RNG", "gradient", "relative distance", "cosine"),
    ),
    Story(
        name="one-snapshot",
        theme=THEME,
        title="One snapshot for all layers",
        question="Is one snapshot of the random generator, taken before the model, enough?",
        paragraphs=(
            "All layers draw from one generator, one after the other, so each starts where the last one stopped. A "
            "tempting shortcut is to take a single snapshot before the whole model and put it back before any block "
            "reruns.",
            "Then every block starts its rerun at the same place in the stream of random numbers. The experiment has a "
            "checkpoint of its own with that shortcut and lays the masks of forward and rerun side by side.",
        ),
        switches=(
            switch(
                "snapshot",
                "Where are snapshots taken?",
                model="Once, before the whole model",
                block="Before each block",
                none="Nowhere",
            ),
        ),
        words=("snapshot", "RNG", "mask", "recompute", "reentrant"),
    ),
    Story(
        name="own-generators",
        theme=THEME,
        title="Random numbers from somewhere else",
        question="Which random generators does a checkpoint put back?",
        paragraphs=(
            "torch's snapshot covers torch's own default generators. A block may draw from others: a torch.Generator "
            "that it owns, Python's random module, numpy. Nobody resets those, and nobody complains.",
            "A policy of this explorer can name them in restore_rng; then they are put back before the block runs "
            "again and afterwards moved on to where they were.",
        ),
        switches=(
            switch(
                "source",
                "Where does the block draw its mask from?",
                generator="A torch.Generator of its own",
                python="Python's random",
                numpy="numpy",
                torch="torch's default generator",
            ),
            switch("restore", "Is it named in restore_rng?", no="No", yes="Yes"),
        ),
        words=("RNG", "snapshot", "mask", "relative distance", "non-reentrant", "reentrant"),
    ),
)
