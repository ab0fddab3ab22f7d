"""Headline figures, and sentences for every word on the page that is not everyday English."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from explorer.record.base import Origin
from explorer.view.drawing.units import count

STEP_PEAK = (
    "The most memory held at any moment of one training step: parameters, optimizer state, gradients and everything "
    "between, in bytes that tensors asked for. On a GPU the caching allocator rounds sizes up and keeps freed memory. "
    "There the device must have the reserved bytes of a step with a warm cache, which stand beside the peak."
)
COST = (
    "What recomputing costs. Floating-point operations of matrix products, convolutions, attention and recurrent "
    "layers are counted exactly; element-wise work is left out. Time is measured in alternating runs. The ± is half "
    "the distance between the quartiles, about one standard deviation: one run in three lies outside."
)
GRADIENTS = (
    "Every gradient of the candidate is compared with the baseline's. Bitwise equal: not one bit differs. Rounding: "
    "as close to a float64 reference as the baseline itself. State moved: gradients are equal, but the recompute "
    "changed state of the next step (a counter, an average, a random generator) a second time. "
    "An equal loss alone proves nothing."
)
HEADLINES = {
    "step_peak_bytes": (
        "The most memory held at any moment of the training step; the device must have at least this much."
    ),
    "saved_after_forward_bytes": (
        "Intermediate results that forward keeps because backward needs them; recomputing a block frees most of its "
        "own."
    ),
    "flop_ratio": (
        "Arithmetic of one step's matrix products, convolutions and attention, counted exactly; element-wise work is "
        "not."
    ),
    "time_ratio": (
        "Median time of a step without recording; ± is half the quartile distance, about one standard deviation, no "
        "bound."
    ),
    "verdict": (
        "Each gradient, and all that the model carries to its next step, compared bit by bit with the baseline's."
    ),
    "n_recompute": (
        "Blocks that forget what they computed and run forward again for backward; a run counts those that really do."
    ),
}
"""The figures of the strip, one sentence each, the same before and after a run."""

TIME_PREDICTED = (
    "Predicted from the measured forward of each block and the time of one checkpoint call. Nine of ten runs should "
    "lie in the interval. Each run of another policy of this model narrows the interval."
)

ORIGIN = {
    "measured": "A clock or an allocator said so during a real step.",
    "counted": "Counted exactly: operations, calls, bytes.",
    "predicted": "Computed from the measured baseline; nothing was run. Press Run to measure it.",
    "simulated": "Simulated by a model of the machine.",
    "recorded": "Recorded by the same instruments in one step of a script.",
    "imaginary card": "Counted by torch's allocator on an imaginary card, which computes no values and has no clock.",
}

RUN = "Runs real training steps of baseline and candidate in turns, and compares every gradient (Ctrl+Enter)."
UNDO = "Take back the last change of the policy (Ctrl+Z)"
REDO = "Make it again (Ctrl+Y)"
SEARCH = "A name jumps to its block; a pattern such as blocks.*.mlp recomputes every block that it matches."
PRESETS = "Replace the policy by a ready-made one; undo brings yours back."
MODEL = "The sample models of this project, and those that you opened."
SIZE = "`small` takes about a second a step on two CPU cores; `gpu` fills a few GiB of a data-centre GPU."
WEIGHTS = (
    "Weights to begin from: .safetensors, or .pt. Offered are the files given on the command line after `--weights`; "
    "as built: those that the model's factory gives."
)

OPEN_MODEL = "Open a model of yours"
OPEN_RIGHTS = "The app runs on this machine with your rights. Opening a model runs its code: open code that you trust."
OPEN_ELSEWHERE = (
    "Only the user who started the app opens models, in a browser on the same machine. "
    "Others choose from those that the app was started with: `make app MODEL=path/to/file.py:factory`."
)
OPEN_FIELD = "Python file, `file.py:Class`, `package.module:factory` or `hf:` name"
OPEN_EXAMPLES = "nets.py, nets.py:Net, hf:GPT2Config, then Enter"
OPEN_HELP = (
    "Paths count from the folder where the app was started; the list has the models found there and those that ran "
    "lately. `hf:` takes a configuration class of transformers or a local config.json: random weights, no download."
)
OPEN_CHOICE = "Which of its models?"
OPEN_WEIGHTS = "optional: a .safetensors or .pt file"
OPEN_BATCH = "It takes a batch of {}."
MADE_BATCH = "The model came without a batch: {}."
OPEN_NUMBERS = (
    "Its numbers. batch, length and side (of a picture; 0: found) shape the batch that is made, where the model brings "
    "none."
)

COUNT_ON_CARD = (
    "torch's CUDA build takes the predicted step on an imaginary card, and its allocator counts. No GPU is needed; a "
    "build of torch without CUDA says how to get the other one."
)
OPTIONS = {
    "predict": "Allocate and run nothing: every figure is predicted. For models that do not fit here.",
    "card": (
        "What this GPU would hold, by CUDA's rules and those of torch's allocator; no GPU is needed. Choose a card, or "
        "type its memory: 24 GiB."
    ),
    "allocator": (
        "PYTORCH_CUDA_ALLOC_CONF of the card: choose options or type one. They follow torch's rules; no history of a "
        "real card was there to check them."
    ),
    "ranks": (
        "Processes that train the model together, each with this batch. The step of every rank is predicted, and the "
        "fullest rank is drawn. 1: no others."
    ),
    "split": (
        "FSDP2: each repeated block and the whole are shards, gathered when needed. DDP: every rank has a copy. "
        "Tensor parallel: all ranks share each product, by the plan that a model of transformers brings. "
        "Stages of a pipeline, one a rank: the Pipeline page."
    ),
    "n_tensor": "Neighbouring ranks that share each product beside FSDP2, by the plan that the model brings.",
    "device": "Where the step runs. cuda is offered where an NVIDIA GPU and its driver are found.",
    "dtype": "Number format of parameters and inputs. own: as the model is built, nothing is cast.",
    "autocast": "Matrix products in a 16-bit format, parameters as they are (mixed precision). No loss is scaled.",
    "optimizer": "AdamW keeps two more numbers per parameter, SGD none without momentum; none stops after backward.",
    "momentum": "Of SGD: keeps one more number per parameter when above zero.",
    "n_accumulation": "Microbatches whose gradients are added up before one optimizer step; the batch is split.",
    "frozen": "Blocks whose parameters are not trained: they need no gradient and no optimizer state.",
    "seed": "Start of all random generators: equal seeds give equal weights, batches and dropout.",
    "mode": "train uses dropout and moves running statistics; eval does neither.",
    "n_repeats": "How many steps are timed, after a warm-up.",
    "n_threads": "CPU threads. One is exact to repeat: two add up sums in another order.",
    "preserve_rng_state": (
        "Put the random generators back before recomputing, so dropout draws the same mask. Off saves a little time "
        "and gives wrong gradients in every block that uses dropout."
    ),
    "use_reentrant": (
        "The older implementation of checkpointing, for comparison. It trains nothing when no input needs a gradient, "
        "and refuses torch.autograd.grad."
    ),
    "early_stop": "Stop recomputing as soon as everything backward needs is there. Off runs the block to its end.",
    "determinism_check": "Compare shapes of recomputed tensors with the first ones and raise an error if they differ.",
    "running_stats": (
        "BatchNorm moves its statistics in forward. once: the recompute leaves them alone. every_forward: torch's own "
        "behaviour, they move twice per step."
    ),
}

CARD = {
    "requested": "Bytes that tensors and the workspaces of cuBLAS ask for.",
    "allocated": "The blocks that torch's allocator hands out for the requests: each request is rounded up.",
    "reserved": "The segments that the allocator takes from the driver. The card must have these.",
    "stranded": "Reserved beyond the allocated peak: no other program can have it, and this step cannot use it.",
    "headroom": "What the card has beyond the reserved bytes, and beyond driver and context.",
}
"""The figures of a card, one sentence each."""

SEGMENT = (
    "A segment keeps only the input of its first block: less memory than its blocks one by one, but all of it is "
    "recomputed at once."
)
EMPTY = "Nothing has been compared yet. Choose blocks in the graph, then press **Run** at the bottom."
NO_BLOCKS = "The model is one module without others inside; there is no block to recompute."
NO_MODEL = (
    "Its model is not here, so nothing can be run: policies are forecast from the record. Apply the policy file in "
    "that script and record again to measure one."
)
NOTHING_RUNS = (
    "Nothing of this model is allocated, so nothing can be run: predict is on, in Options. Switch it off to measure."
)
PREDICT = "Plays a step under this policy, without data: nothing is allocated, and every figure is predicted."
PREDICT_PLAYS = "Predict plays a step of this policy. Nothing is allocated and nothing runs."
PREDICT_RANKS = (
    "A toggle forecasts the fullest rank. Predict plays every kind of rank, with a segment's gathers and its traffic."
)
COLLECTIVES = (
    "Calls in which ranks exchange tensors, the marks above the timeline. Sent: by the ring algorithm, "
    "(n - 1) / n of the tensor, twice for an all-reduce."
)
MEASURED_RANKS = (
    "The page starts no ranks: policies are forecast from these. Switch predict on in Options to predict them."
)
NOT_PLAYED = "Nothing has been played yet. Choose blocks in the graph, then press **Predict** at the bottom."
NO_CLOCK = ":violet-badge[:material/visibility: predicted] Counted on steps without data; no clock ran."
PREDICTED_ORIGIN = "Played without data, or computed from such a step: nothing was allocated and nothing was run."
OPENED = ":violet-badge[:material/folder_open: opened run] Compared with this, not with everything kept:"
FITTED = ":violet-badge[:material/memory: what fitted] Compared with the run that fitted, not with everything kept:"
ABOUT = (
    "**Choose blocks that compute their activations again in backward, and see what a training step saves and costs.** "
    "Begin with this model, or with *Open a model of yours*."
)
GRAPH_FOLLOWS = "The model is being read: its graph comes first, then the recorded step."
STEP_FOLLOWS = "The step is being recorded: its timeline comes next, then times."
GRADIENTS_FOLLOW = "Both steps are recorded; every gradient is being compared."
CHOOSE = "Choose blocks, then press **Run**."


Source = Literal["none", "another machine", "recorded", "predicted", "measured"]
"""Where the runs that are drawn come from. Recorded: in a script, or on ranks that the page does not start."""
Subject = Literal["baseline", "part of the baseline", "opened run", "both runs", "part of both runs"]


class PageAnswer(NamedTuple):
    """What the figures of the page are. `View.answer` decides it, and ANSWERS has its sentences."""

    source: Source
    of: Subject = "baseline"
    is_current: bool = True
    """Whether the figures are about the drawn policy and options."""
    failed: bool = False
    """Whether the run ended before everything was measured."""


STALE = (
    ":orange-badge[:material/history: for the previous policy] These charts are older than the graph. "
    "Press **Run** to measure it."
)
PREDICTED = ":violet-badge[:material/visibility: predicted]"
MEASURED = ":green-badge[:material/check: measured]"
EARLIER = ":blue-badge[:material/history: {where}]"
PRESS_RUN = f"{PREDICTED} {{figures}} Press **Run** to measure it."
SO_FAR = ":green-badge[:material/check: measured so far]"
ANSWERS = {
    PageAnswer("none"): [f"{ABOUT} Nothing was measured yet."],
    PageAnswer("another machine"): [
        f"{ABOUT} {EARLIER} Figures of this machine take its place as they come.",
        f"{{figures}} {EARLIER}",
    ],
    PageAnswer("recorded"): [":blue-badge[:material/sensors: recorded] One step of {where}"],
    PageAnswer("predicted"): [
        f"{PREDICTED} Nothing is allocated, nothing runs: every figure is predicted. "
        "Choose blocks, then press **Predict**."
    ],
    PageAnswer("predicted", is_current=False): [
        ":orange-badge[:material/history: for other options] Predicted before the options were changed; it is played "
        "again."
    ],
    PageAnswer("predicted", "both runs"): [
        f"{PREDICTED} Played without data: everything kept, and this policy.",
        f"{PREDICTED} {{figures}} Nothing ran.",
    ],
    PageAnswer("predicted", "both runs", is_current=False): [
        ":orange-badge[:material/history: for the previous policy] These charts are older than the graph. "
        "Press **Predict** to play it."
    ],
    PageAnswer("measured"): [":gray-badge[:material/straighten: baseline] Measured with everything kept.", PRESS_RUN],
    PageAnswer("measured", failed=True): [
        ":red-badge[:material/error: failed] This run was cut short: its figures are of the part that ran."
    ],
    PageAnswer("measured", is_current=False): [
        ":orange-badge[:material/history: for other options] The baseline ran before the options were changed. "
        "Press **Run** to measure both runs with these."
    ],
    PageAnswer("measured", "part of the baseline"): [
        ":gray-badge[:material/straighten: baseline] Recorded here with everything kept; its steps are being timed, "
        "and costs in time follow.",
        f"{PREDICTED} {{figures}} Steps are being timed.",
    ],
    PageAnswer("measured", "opened run"): ["", PRESS_RUN],
    PageAnswer("measured", "both runs"): [f"{MEASURED} Both runs kept everything.", f"{MEASURED} {{figures}}"],
    PageAnswer("measured", "both runs", failed=True): [
        ":red-badge[:material/error: failed] A run was cut short: savings and equality are unknown. The {failure}."
    ],
    PageAnswer("measured", "both runs", is_current=False): [STALE, f"{{figures}} {STALE}"],
    PageAnswer("measured", "part of both runs"): [
        f"{SO_FAR} Bytes first, then gradients, then times.",
        f"{SO_FAR} {{figures}}",
    ],
    PageAnswer("measured", "part of both runs", failed=True): [
        ":gray-badge[:material/block: cut short] The run ended before everything was measured."
    ],
}
"""The answers that there are, with their sentences: the last one has the figures of a drawn policy.

An older run is only older: how it ended is not told. No prediction is cut short.
"""


def stand_in_text(age_s: float | None, *, here: bool) -> str:
    """Where and when a run was measured that stands in for one of this machine; None: bundled with the app."""
    where = "measured before the model's file changed" if here else "recorded on another machine"
    return f"{where}{'' if age_s is None else f', {ago(age_s)}'}"


def ago(age_s: float) -> str:
    """`3 hours ago`: the largest whole unit of an age."""
    units = {"day": 86_400, "hour": 3_600, "minute": 60}
    n, unit = next(((int(age_s // size), unit) for unit, size in units.items() if age_s >= size), (0, ""))
    return f"{count(n, unit)} ago" if n else "a moment ago"


Tone = Literal["good", "bad", "neutral"]

LABELS = {
    "step_peak_bytes": "Step peak",
    "saved_after_forward_bytes": "Saved after forward",
    "flop_ratio": "FLOPs",
    "total_flops": "FLOPs",
    "time_ratio": "Step time",
    "step_ms": "Step time",
    "verdict": "Gradients",
    "n_recompute": "Recomputed",
}
"""Labels of the strip, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A figure: its value, the text beside the value, and the origin."""

    key: str = ""
    """The derived figure's name in `--json`; empty if there is none."""
    value: str
    label: str = ""
    """By default that of the figure's key."""
    delta: str = ""
    """Change against the baseline; empty without a baseline."""
    tone: Tone = "neutral"
    origin: tuple[Origin, ...] = ()
    tooltip: str = ""
    """A sentence that a student understands; by default that of the figure's key."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or LABELS[self.key])
        object.__setattr__(self, "tooltip", self.tooltip or HEADLINES[self.key])
