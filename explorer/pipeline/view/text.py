"""Sentences that a student understands, for every word of the Pipeline page that is not everyday English."""

from __future__ import annotations

from explorer.pipeline.plan.cuts import CutRule
from explorer.pipeline.plan.schedules import SCHEDULES
from explorer.pipeline.record.step import JointPlan, PipelineRun
from explorer.view.drawing.units import count, mib

STAGE = (
    "A stage is a run of consecutive blocks; each stage but the first waits for the one before it. Cut between two "
    "blocks of the graph, or give a number and let parameters be balanced."
)
MICROBATCH = (
    "The batch is split into this many equal parts that pass through the stages one behind the other, so that stages "
    "work at the same time. More of them shrink the bubble; each one is smaller and uses the device less well."
)
RANK = "A rank is one process with a device of its own. It holds one stage, or several in the interleaved schedules."
SCHEDULE = " ".join(
    ("Who does what in which order.", *(f"{schedule.name}: {schedule.words}." for schedule in SCHEDULES.values()))
)
RANKS = f"{RANK} Schedules that put several stages on a rank leave the number open; for the others there is only one."
EQUAL_RANKS = (
    "The model is cut for each schedule: one stage a rank, or two where a rank holds several. So the schedule is all "
    "that differs, beside the cuts that it needs."
)
STEP = "Time from the first to the last action, every rank on a machine of its own, without the optimizer."
WALL = (
    "Wall time from the first to the last action as the ranks' own clocks read it, with links, waiting and contention. "
    "Without the optimizer."
)
LINKS = "What links cost: a rank was free and its neighbour done, and it waited for the transfer between them."
BUBBLE = "The bubble: share of the ranks' time in which they wait for each other, averaged over the ranks."
PEAK = (
    "Most bytes that the fullest rank holds at once in forward and backward: parameters, receive buffers (space for "
    "what arrives from other ranks), saved activations and gradients. The optimizer's state (two copies of the "
    "trained parameters for AdamW) is counted and comes on top: both have to fit on that rank's device."
)
TRUTH = (
    "Gradients that splitting left equal in every bit, held against the unsplit model on the same microbatches. "
    "The Gradients tab says what microbatching and recompute changed before that."
)
PLAN = "Stages have colours in the graph. Click a line between two blocks to cut there, or again to join."
CRITICAL = (
    "The critical path is the chain of actions that wait for nothing but each other: to shorten the step, one of these "
    "has to get shorter. Everything else has slack."
)
NEEDS_REAL_STEPS = (
    "Stages are priced by real steps, and nothing of this model is allocated: predict is on. Switch it off in Options "
    "to split it."
)
RECEIVE = (
    "Receive buffers are space for boundary activations and gradients that other ranks send, one for each microbatch, "
    "held for the whole step. More microbatches in flight or a wider cut make them larger."
)
BALANCE: dict[CutRule, str] = {
    "by-parameters": "even parameters",
    "by-time": "even time",
    "by-memory": "even memory",
}
BALANCE_HELP = (
    "Cut into the same number of stages so that the heaviest stage is as light as possible: by parameters, by "
    "measured forward and backward time, or by what a stage holds while its microbatches are in flight."
)
IN_TURNS = "Ranks take turns on this device. For real ranks take the torchrun files from the tab Files."
CHECKPOINT = (
    "Which microbatches recompute the blocks of the policy. **except_last** keeps the last one, whose backward starts "
    "at once under GPipe; the words are torchgpipe's."
)
KEYED = (
    "Seeds dropout by (seed, block, microbatch), so that every split draws the same masks. Without it the masks, and "
    "so the gradients, depend on the split."
)
DEFERRED = "Running statistics of BatchNorm move once per batch instead of once per microbatch."
RUN = "Runs the pipelined step for real, and the unsplit model beside it, and compares every gradient (Ctrl+Enter)."

NOT_YET = ":gray-badge[:material/timeline: predicted] Drawn from the price of each block. **Run** measures this plan."
MEASURED = ":green-badge[:material/check: measured]"
THIN_ROWS = " The thin row below each rank is what was predicted."
OLDER = ":orange-badge[:material/history: for an earlier plan] The plan was changed since this run."
ONE_RANK = (
    "All stages are on one rank, so nothing runs side by side: this schedule puts two stages on every rank. Use four "
    "stages or more."
)
LEGEND = (
    "Numbers are microbatches; the gaps are the bubble. Where a rank holds several stages, bars say stage:microbatch "
    "and have the edge of the stage's colour in the graph."
)
CAP = (
    "What every rank may hold, the optimizer's state included. The planner tries cuts, numbers of "
    "microbatches and policies, and takes the quickest step whose ranks all stay below this limit. Example: 200MiB."
)
READ_TRUTH = (
    "Read downwards: full batch, then microbatches, then with recompute, then split; each row counts what this one "
    "step left equal in every bit. Microbatching alone changes gradients where a microbatch has a dropout mask, a "
    "BatchNorm mean, a changed buffer or, with class weights or ignored targets, a divisor of the loss of its own; "
    "elsewhere it only sums in another order. Rounding: the distance "
    "from the same step in float64 is at most ten times that of the unsplit model. Where float64 draws other masks, a "
    "moved gradient counts as different."
)
EMPTY_TRUTH = (
    "After a run: the full batch, the microbatched, the recomputed and the split model are compared gradient by "
    "gradient, so that a difference has a cause. Press **Run**."
)
EMPTY_CALLS = "After a run: how often each block ran forward, counted. Recompute shows as a second run. Press **Run**."
EMPTY_SCHEDULE = (
    "The price of each block is measured first, a few dozen steps of the model: seconds for a small one, minutes for a "
    "large one. The schedule is drawn from it; the bar below says how far it is."
)
NOT_PREDICTED = (
    "This schedule splits the backward (I, W): its time and memory are not predicted. Press **Run** to measure them."
)
KEEPS_ALL = "Everything is kept. Click a block to recompute it; the policy is that of the Explore page."


def plan_sentence(joint: JointPlan) -> str:
    """Words for a plan below a cap: what was chosen, and among how many."""
    stages = "+".join(str(len(stage)) for stage in joint.plan.stages)
    return (
        f"Planned below {mib(joint.cap_bytes)} a rank: stages of {stages} blocks, {joint.plan.n_microbatches} "
        f"microbatches, {count(len(joint.policy.units), 'block')} recomputed; fullest rank "
        f"{mib(max(joint.rank_bytes))}, step {joint.makespan_ms:.1f} ms, all predicted. The quickest of "
        f"{joint.n_judged} plans that were tried."
    )


def within_cap(run: PipelineRun, joint: JointPlan) -> bool | None:
    """Whether every rank of `run` held at most the cap that `joint` was made below; None: no rank was measured."""
    return None if run.fullest_bytes is None else run.fullest_bytes <= joint.cap_bytes


def cap_outcome(run: PipelineRun, joint: JointPlan) -> str:
    """Words for whether `run` stayed below the cap; empty if no rank was measured."""
    met = within_cap(run, joint)
    if met is None:
        return ""
    fullest = max(run.memory, key=lambda memory: memory.device_bytes or 0)
    size = mib(fullest.device_bytes)
    if met:
        return f"cap {mib(joint.cap_bytes)} kept: the fullest rank holds {size}"
    return f"cap {mib(joint.cap_bytes)} missed: rank {fullest.rank} needs {size}"
