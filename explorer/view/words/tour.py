"""The guided path of a first visit: what each step says. Where figures stand in braces the page fills in its own."""

from __future__ import annotations

from explorer.record.base import Record


class TourStep(Record):
    """One thing to do; `key` is how the page knows whether it was done."""

    key: str
    title: str
    text: str


OFFER = "New here? Five minutes on a small GPT: see, guess, toggle, run, understand, take away."
STEPS = (
    TourStep(
        key="see",
        title="See",
        text="This is one training step of a small GPT, measured a moment ago. The headline says how much it held at "
        "its worst moment: {peak}. The graph shows its blocks, each with the bytes that it keeps so that backward can "
        "use them: {saved} together, and all of it waits until backward comes round.",
    ),
    TourStep(
        key="guess",
        title="Guess",
        text="Recomputing a block means: forward forgets what it made inside of the block and keeps only what went in; "
        "backward runs the block again when it needs the rest. If every block of this GPT is recomputed, "
        "**what will the peak be?**",
    ),
    TourStep(
        key="toggle",
        title="Toggle",
        text="Click blocks in the graph, or take *Recompute all* from the presets above it. The headline answers at "
        "once; ≈ marks a forecast, nothing was run for it.",
    ),
    TourStep(
        key="run",
        title="Run",
        text="Press *Run* at the bottom. It takes real training steps, with and without your policy, in turns, and "
        "compares every gradient.",
    ),
    TourStep(
        key="understand",
        title="Understand",
        text="{before} became {after}. It costs {cost}, because blocks ran forward twice. Gradients: *{verdict}*. "
        "Bitwise equal is what makes it safe: training takes exactly the same steps. *Memory* below shows when what is "
        "held, and why the peak lies where it lies now.",
    ),
    TourStep(
        key="take",
        title="Take away",
        text="*Policy file* at the bottom holds your decision, for `explorer.apply_policy` in a training script. *For "
        "another program* in it writes the same for transformers, torchtitan, Megatron-LM and others, and says what is "
        "lost there. Your own settings of those can be opened there too.",
    ),
    TourStep(
        key="batchnorm",
        title="The trap: BatchNorm",
        text="Gradients can be equal and training another one all the same. Open the ResNet, recompute all, set "
        "*running_stats* under Options to every_forward, and press Run: BatchNorm's running averages move twice a "
        "step, and the verdict says so. With *once* they move once; the option returns to it when you go on.",
    ),
    TourStep(
        key="split",
        title="Split",
        text="The other way to fit a model: cut it into stages, one for each device. On the page *Pipeline*, press "
        "*Run*. The bars show which device works when; the gaps between them are the bubble, time in which it waits.",
    ),
    TourStep(
        key="challenge",
        title="Your turn",
        text="Find a policy that solves it, and press Run; it is marked here, and on the command line by "
        "`python -m explorer grade`.",
    ),
)
