"""Glossary of the lab, and the sentences of the tour on a first visit."""

from __future__ import annotations

from msgspec.structs import replace

from explorer.record.base import Record

GLOSSARY: dict[str, str] = {
    "gradient": "How the loss would change if a parameter changed a little. Training moves parameters against it.",
    "bitwise equal": "Every bit of every number agrees. The strictest test there is; nothing is rounded away.",
    "rounding": "Not every bit agrees, but the result is as near to an exact (float64) calculation as the baseline is.",
    "relative distance": "Length of the difference divided by the length of the baseline's gradient: 0 means the same, "
    "1 means as wrong as having no gradient.",
    "cosine": "1 when two gradients point the same way, 0 when they have nothing to do with each other.",
    "recompute": "Run a block's forward again during backward, instead of keeping what the first forward made.",
    "saved activations": "Tensors that forward keeps because backward will need them.",
    "mask": "The zeros and ones with which dropout decides what to drop.",
    "snapshot": "A copy of a random generator's state: put it back, and the same numbers are drawn again.",
    "RNG": "Random number generator. Its state decides every number it will draw.",
    "FLOPs": "Floating-point operations, counted from tensor shapes: exact, and the same on every machine.",
    "running statistics": "BatchNorm's moving mean and variance, updated by every training forward, used in eval mode.",
    "non-reentrant": "torch's newer checkpointing: autograd hooks notice when a dropped tensor is needed and rerun the "
    "block.",
    "reentrant": "torch's older checkpointing: the block is one big operation whose backward runs a second, inner "
    "backward.",
    "pullback": "The function that turns a gradient at the output into gradients at inputs and parameters: what "
    "backward calls.",
    "store": "A table from parameter names to gradients.",
    "segment": "Consecutive steps of a net that are recomputed together.",
    "microbatch": "A slice of the batch that passes through the net on its own.",
    "Hessian-vector product": "The derivative of the gradient in one direction: second order, so backward itself must "
    "be differentiable.",
    "gradient penalty": "A loss that contains a gradient, so training differentiates through backward.",
    "always / except_last / never": "Which microbatches are checkpointed: all, all but the last, none.",
    "early stop": "Ending a recompute as soon as backward has every tensor it needs.",
    "expert": "One of several alternative layers; a router sends each token to one of them.",
}


class TourStep(Record):
    """A step of the tour; by its `key` the page tells whether the step is done."""

    key: str
    title: str
    text: str


ON_GPT = "This step is about the small GPT."
NOTHING_RAN = "Nothing ran, so there is nothing to compare yet. Press *Run*: the figures stand here when it ends."
OFFER = "On a small GPT: see, guess, toggle, run, understand, take away a policy file."
STEPS = (
    TourStep(
        key="see",
        title="See",
        text="This is one training step of {model}. The headline says how much it held at "
        "its worst moment: {peak}. The graph shows its blocks, each with the bytes that it keeps so that backward can "
        "use them: {saved} together. All of them wait for backward: the orange area of the chart.",
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
        text="Press *Policy file* at the bottom, then *Policy with evidence*. A training script applies the file with "
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
