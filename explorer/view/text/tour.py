"""The sentences of the tour on a first visit."""

from __future__ import annotations

from msgspec.structs import replace

from explorer import slices
from explorer.record.base import Record


class TourStep(Record):
    """A step of the tour; by its `key` the page tells whether the step is done."""

    key: str
    title: str
    text: str


ON_GPT = "This step is about the small GPT."
NOTHING_RAN = "Nothing ran, so there is nothing to compare yet. Press *Run*: the figures appear here when it ends."
OFFER = "On a small GPT: see, guess, toggle, run, understand, take away a policy file."
_ALL_STEPS = (
    TourStep(
        key="see",
        title="See",
        text="This is one training step of {model}. The headline says how much it held at "
        "its worst moment: {peak}. The graph shows its blocks, each with the bytes that it keeps so that backward can "
        "use them: {saved} together. All of them wait for backward: the layers of the chart.",
    ),
    TourStep(
        key="guess",
        title="Guess",
        text="Recomputing a block means: forward keeps the block's input only, and backward runs the block again when "
        "it needs the rest. If every block that counts is recomputed, **what will the peak be?**",
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
        text="Press *Policy file* at the bottom, then *Download (YAML)*. A training script applies the file with "
        "`explorer.apply_policy`; transformers and FSDP2 get a file of their own there. What "
        "follows is longer: a trap, a model split over devices, and three exercises.",
    ),
    TourStep(
        key="batchnorm",
        title="The trap: BatchNorm",
        text="Gradients can be equal while training still changes. Open the ResNet, recompute all, set "
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

STEPS = tuple(step for step in _ALL_STEPS if step.key != "split" or "pipeline" in slices.names())
_BY_KEY = {step.key: step for step in STEPS}
STATIC_STEPS = (
    replace(_BY_KEY["see"], text=_BY_KEY["see"].text.replace("the orange area of the", "the grey line of the")),
    _BY_KEY["guess"],
    _BY_KEY["toggle"],
    TourStep(
        key="budget",
        title="Set a budget",
        text="Drag the *Budget*: the graph follows with the cheapest policy within it. A planner found these policies "
        "before the page was written, and a solver proved how far each can be from the best.",
    ),
    TourStep(
        key="take",
        title="Take away",
        text="*Policy file* below the graph saves your decision, for `explorer.apply_policy` in a training script. "
        "A link to this state opens the page with your policy. Only a run in the app shows that gradients are equal.",
    ),
)
"""The path of a page without a server, where nothing can be run."""
