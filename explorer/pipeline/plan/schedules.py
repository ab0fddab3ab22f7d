"""The schedules by name, one row each, the order of actions of each, and the rows of actions that a plan runs.

A new schedule is a row of SCHEDULES and a function that writes its actions: the command line, the page and the hazards
read the row. Orders are generated here rather than by torch, because the page predicts without torch. They equal
torch's, action for action (test_in_process.py). 1F1B is the exception: torch's listing of 1F1B is not what it runs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from explorer.errors import InvalidPlan, nearest
from explorer.pipeline.plan.actions import Action, Rows, check_rows, parse_rows
from explorer.record.graph import ModelGraph
from explorer.record.run import PipelinePlan


def gpipe(n_ranks: int, n_microbatches: int) -> Rows:
    """GPipe: all forwards, then all backwards."""
    return tuple(
        tuple(Action(rank, kind, i) for kind in "FB" for i in range(n_microbatches)) for rank in range(n_ranks)
    )


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Rows:
    """Fill the pipeline, then one forward, one backward; at most min(m, p - r) microbatches in flight on rank r."""
    rows = []
    for rank in range(n_ranks):
        n_warmup = min(n_microbatches, n_ranks - 1 - rank)
        row = [Action(rank, "F", i) for i in range(n_warmup)]
        for i in range(n_microbatches):
            if i + n_warmup < n_microbatches:
                row.append(Action(rank, "F", i + n_warmup))
            row.append(Action(rank, "B", i))
        rows.append(tuple(row))
    return tuple(rows)


def looped_bfs(n_ranks: int, n_microbatches: int, n_local: int = 2) -> Rows:
    """GPipe over looped stages: a rank finishes all microbatches of a stage before its next; backward mirrors it."""
    rows = []
    for rank in range(n_ranks):
        forward = [
            Action(stage, "F", i) for stage in range(rank, n_ranks * n_local, n_ranks) for i in range(n_microbatches)
        ]
        rows.append((*forward, *(Action(done.stage, "B", done.microbatch) for done in reversed(forward))))
    return tuple(rows)


def interleaved(n_ranks: int, n_microbatches: int, n_local: int = 2, *, zero_bubble: bool = False) -> Rows:
    """Interleaved 1F1B; with `zero_bubble` its backward is split and W fills the gaps (ZB1P).

    Microbatches go in `n_rounds` rounds, of equal size.
    """
    return tuple(_interleaved_row(rank, n_ranks, n_microbatches, n_local, zero_bubble) for rank in range(n_ranks))


def n_rounds(n_ranks: int, n_microbatches: int) -> int:
    """Number of rounds of an interleaved schedule: about one for every `n_ranks` microbatches."""
    return max(1, n_microbatches // n_ranks)


def _interleaved_row(
    rank: int, n_ranks: int, n_microbatches: int, n_local: int, zero_bubble: bool
) -> tuple[Action, ...]:
    per_round = n_microbatches // n_rounds(n_ranks, n_microbatches)
    n_ops = n_local * n_microbatches
    hops = (1 if zero_bubble else 2) * (n_ranks - 1 - rank)
    n_warmup = min((n_local - 1) * per_round + hops, n_ops)
    # Op k of a rank belongs to local stage (k // per_round) mod n_local; backward visits the local stages in reverse.
    local = [(k // per_round) % n_local for k in range(n_ops)]
    forward = _numbered("F", [rank + n_ranks * j for j in local])
    backward = _numbered("I" if zero_bubble else "B", [rank + n_ranks * (n_local - 1 - j) for j in local])
    row = forward[:n_warmup]
    n_weights = 0
    for k, back in enumerate(backward):
        if n_warmup + k < n_ops:
            row.append(forward[n_warmup + k])
        row.append(back)
        if zero_bubble and k >= rank:
            row.append(backward[n_weights]._replace(kind="W"))
            n_weights += 1
    row += [back._replace(kind="W") for back in backward[n_weights:]] if zero_bubble else []
    return tuple(row)


def _numbered(kind: str, stages: list[int]) -> list[Action]:
    """Actions of `kind` on `stages` in order, each stage counting its own microbatches from 0."""
    counts: defaultdict[int, int] = defaultdict(int)
    actions = []
    for stage in stages:
        actions.append(Action(stage, kind, counts[stage]))
        counts[stage] += 1
    return actions


class _Recorder:
    """Writes one rank's row of a V schedule: chunk 0 goes down the V, chunk 1 comes back up."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        self.stages = (rank, 2 * n_ranks - 1 - rank)
        self.row: list[Action] = []
        self.counts: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.owed: deque[Action] = deque()
        """Weight gradients not yet written, oldest first."""

    def repeat(self, times: int, moves: str) -> None:
        """Writes `moves` so many times. `F0 I1 W1`: a kind and a chunk each; `W` is the oldest weight gradient owed."""
        for move in times * moves.split():
            kind, chunk = move[0], map(int, move[1:])
            if kind == "W":
                self._weight(*chunk)
            else:
                self._do(kind, *chunk)

    def _do(self, kind: str, chunk: int) -> None:
        counter = (chunk, "F" if kind == "F" else "back")
        action = Action(self.stages[chunk], kind, self.counts[counter])
        self.counts[counter] += 1
        self.row.append(action)
        if kind == "I":
            self.owed.append(Action(action.stage, "W", action.microbatch))

    def _weight(self, chunk: int | None = None) -> None:
        """The oldest weight gradient owed (of `chunk`); nothing where none is owed."""
        for action in self.owed:
            if chunk is None or action.stage == self.stages[chunk]:
                self.owed.remove(action)
                self.row.append(action)
                return


def zbv_zero_bubble(n_ranks: int, n_microbatches: int) -> Rows:
    """Zero bubble over a V of two stages a rank; memory held as in 1F1B."""
    rows = []
    n_padded = max(2 * n_ranks - 1, n_microbatches)
    for rank in range(n_ranks):
        write = _Recorder(rank, n_ranks)
        write.repeat(2 * (n_ranks - rank) - 1, "F0")
        write.repeat(rank, "F1 F0")
        write.repeat(n_ranks - rank, "F1 I1 W1")
        while write.counts[1, "F"] < write.counts[0, "F"] or write.counts[0, "F"] < n_padded:
            if write.counts[0, "F"] < n_padded:
                write.repeat(1, "F0")
            write.repeat(1, "I0 W0 F1 I1 W1")
        write.repeat(rank, "I0 I1")
        write.repeat(n_ranks - rank, "I0 W0")
        write.repeat(len(write.owed), "W1")
        write.repeat(len(write.owed), "W0")
        rows.append(tuple(action for action in write.row if action.microbatch < n_microbatches))
    return tuple(rows)


def dual_pipe_v(n_ranks: int, n_microbatches: int) -> Rows:
    """DualPipe folded into a V of two stages a rank: forwards of one chunk beside backwards of the other."""
    rows = []
    for rank in range(n_ranks):
        write = _Recorder(rank, n_ranks)
        after = n_ranks - 1 - rank
        write.repeat(2 * after, "F0")
        write.repeat(rank + 1, "F0 F1")
        write.repeat(after, "I1 W F1")
        write.repeat(n_microbatches - 2 * n_ranks + rank + 1, "F0 B1 F1 B0")
        write.repeat(after, "B1 F1 B0")
        # Half-way through the last rank + 1 rounds the backward is split, so that W can fill the drain.
        for k in range(2 * (rank + 1)):
            write.repeat(1, f"{'B' if k <= rank else 'I'}{1 - k % 2}")
        write.repeat(after, "W I0")
        write.repeat(rank + 1, "W")
        rows.append(tuple(write.row))
    return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers of a plan that a schedule has to fit."""

    n_stages: int
    n_ranks: int
    n_microbatches: int


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition on the sizes of a schedule, beyond its shape. torch refuses other sizes."""

    rule: str
    """The name of the hazard if the condition is not met."""
    met: Callable[[Sizes], bool]
    sentence: str
    """The fault, after the name of the schedule; names of sizes in braces."""
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """An order in which ranks do their forwards and backwards."""

    name: str
    generate: Callable[[int, int, int], Rows]
    """Rows of actions from the numbers of ranks, of microbatches, and of stages per rank."""
    shape: Literal["single", "looped", "v"]
    """Stages per rank: one; two or more, dealt out in turn; exactly two, down a V and up."""
    words: str
    """A phrase for the help of the page."""
    source: str
    splits_backward: bool = False
    """True if gradients of inputs and weights are computed separately. Non-reentrant checkpoints run again for each."""
    conditions: tuple[Condition, ...] = ()


FILLED = Condition(
    rule="few-microbatches",
    met=lambda sizes: sizes.n_microbatches >= sizes.n_stages,
    sentence="needs at least as many microbatches as stages: {n_microbatches} for {n_stages} stages.",
    remedy="Use at least {n_stages} microbatches, or the schedule GPipe.",
)
EQUAL_ROUNDS = Condition(
    rule="uneven-rounds",
    met=lambda sizes: sizes.n_microbatches % n_rounds(sizes.n_ranks, sizes.n_microbatches) == 0,
    sentence="sends microbatches in equal rounds of about {n_ranks}, and {n_microbatches} do not divide into them.",
    remedy="Use a multiple of {n_ranks} microbatches.",
)

_ROWS = (
    Schedule(
        name="GPipe",
        generate=lambda p, m, v: gpipe(p, m),
        shape="single",
        words="all forwards, then all backwards",
        source="Huang et al., arXiv 1811.06965",
    ),
    Schedule(
        name="1F1B",
        generate=lambda p, m, v: one_f_one_b(p, m),
        shape="single",
        words="one forward, one backward, so fewer microbatches wait",
        source="Narayanan et al., PipeDream-Flush, arXiv 2006.09503",
        conditions=(FILLED,),
    ),
    Schedule(
        name="Interleaved1F1B",
        generate=interleaved,
        shape="looped",
        words="1F1B with two or more stages a rank",
        source="Narayanan et al., arXiv 2104.04473",
        conditions=(EQUAL_ROUNDS,),
    ),
    Schedule(
        name="LoopedBFS",
        generate=looped_bfs,
        shape="looped",
        words="GPipe with two or more stages a rank",
        source="Lamy-Poirier, arXiv 2211.05953",
    ),
    Schedule(
        name="InterleavedZeroBubble",
        generate=lambda p, m, v: interleaved(p, m, v, zero_bubble=True),
        shape="looped",
        words="Interleaved1F1B, with backward split in an input part and a weight part that fills the gaps",
        source="Qi et al., arXiv 2401.10241",
        splits_backward=True,
        conditions=(EQUAL_ROUNDS,),
    ),
    Schedule(
        name="ZBVZeroBubble",
        generate=lambda p, m, v: zbv_zero_bubble(p, m),
        shape="v",
        words="backward split likewise; a rank holds the n-th stage and the n-th from the end",
        source="Qi et al., arXiv 2401.10241",
        splits_backward=True,
    ),
    Schedule(
        name="DualPipeV",
        generate=lambda p, m, v: dual_pipe_v(p, m),
        shape="v",
        words="stages as in ZBVZeroBubble; forwards of one run beside backwards of the other",
        source="DeepSeek-V3, arXiv 2412.19437",
        splits_backward=True,
        conditions=(FILLED,),
    ),
)
SCHEDULES = {schedule.name: schedule for schedule in _ROWS}


USUAL = PipelinePlan(stages=(), n_microbatches=4, schedule="1F1B")
"""The plan, without its cuts, of a person who has chosen nothing."""


def fitting(most: int, graph: ModelGraph) -> int:
    """The number of microbatches: `most`, or the next lower number that divides the batch."""
    n_rows = graph.input_shapes[0][0] if graph.input_shapes and graph.input_shapes[0] else most
    return next((n for n in range(most, 0, -1) if n_rows % n == 0), 1)


def default_ranks(schedule: str, n_stages: int) -> int:
    """Ranks a plan takes when it names none: one a stage, or half as many where a rank holds two stages."""
    row = SCHEDULES.get(schedule)
    return n_stages if row is not None and row.shape == "single" else max(1, n_stages // 2)


def rank_counts(schedule: str, n_stages: int) -> tuple[int, ...]:
    """All numbers of ranks on which the schedule can run `n_stages` stages."""
    row = SCHEDULES.get(schedule)
    counts = range(1, n_stages + 1)
    return () if row is None else tuple(n for n in counts if not _misshapen(row, n_stages, n))


def splits_backward(plan: PipelinePlan) -> bool:
    """Whether backwards are done in two parts, I and W."""
    if plan.actions:
        return any("I" in action for row in plan.actions for action in row)
    return plan.schedule in SCHEDULES and SCHEDULES[plan.schedule].splits_backward


def runs_1f1b(plan: PipelinePlan) -> bool:
    """Whether torch's own 1F1B runs the plan, which holds fewer sent tensors than torch's other schedules."""
    return plan.schedule == "1F1B" and not plan.actions


def sizes_of(plan: PipelinePlan) -> Sizes:
    """The plan's numbers, its ranks by default where it names none."""
    n_stages = len(plan.stages)
    n_ranks = plan.n_ranks or default_ranks(plan.schedule, n_stages)
    return Sizes(n_stages=n_stages, n_ranks=n_ranks, n_microbatches=plan.n_microbatches)


def unmet(schedule: str, sizes: Sizes) -> tuple[tuple[str, str, str], ...]:
    """Rule, sentence and remedy of each condition of the schedule that these sizes do not meet."""
    row = SCHEDULES.get(schedule)
    numbers = vars(sizes)
    return tuple(
        (condition.rule, f"{schedule} {condition.sentence.format(**numbers)}", condition.remedy.format(**numbers))
        for condition in (row.conditions if row is not None else ())
        if not condition.met(sizes)
    )


def rows_of(plan: PipelinePlan) -> Rows:
    """The plan's own actions, or those of its schedule, checked. Raises InvalidPlan with all faults at once."""
    if plan.actions:
        rows = parse_rows(plan.actions)
    else:
        if plan.schedule not in SCHEDULES:
            known = f"Known: {', '.join(SCHEDULES)}."
            raise InvalidPlan(
                f"There is no schedule {plan.schedule!r}.", hint=nearest(plan.schedule, SCHEDULES) or known
            )
        schedule, sizes = SCHEDULES[plan.schedule], sizes_of(plan)
        if faults := _faults(schedule, sizes):
            raise InvalidPlan(" ".join(faults), hint="Change the stages, the ranks, the microbatches or the schedule.")
        rows = schedule.generate(sizes.n_ranks, sizes.n_microbatches, sizes.n_stages // sizes.n_ranks)
    check_rows(rows, n_stages=len(plan.stages), n_microbatches=plan.n_microbatches)
    return rows


def _faults(schedule: Schedule, sizes: Sizes) -> list[str]:
    """Why this schedule cannot be generated for these numbers: torch's own conditions."""
    n_stages, n_ranks, n_microbatches = sizes.n_stages, sizes.n_ranks, sizes.n_microbatches
    if n_stages < 1 or n_microbatches < 1 or n_ranks < 1:
        return [f"A plan needs stages and microbatches; it has {n_stages} and {n_microbatches}."]
    faults = _misshapen(schedule, n_stages, n_ranks)
    return [*faults, *(sentence for _, sentence, _ in unmet(schedule.name, sizes))]


def _misshapen(schedule: Schedule, n_stages: int, n_ranks: int) -> list[str]:
    numbers = f"{n_stages} stages are asked on {n_ranks} ranks."
    if schedule.shape == "single" and n_ranks != n_stages:
        return [f"{schedule.name} runs one stage a rank; {numbers}"]
    if schedule.shape == "looped" and (n_stages % n_ranks or n_stages < 2 * n_ranks):
        return [f"{schedule.name} runs two or more stages on every rank; {numbers}"]
    if schedule.shape == "v" and n_stages != 2 * n_ranks:
        return [f"{schedule.name} runs exactly two stages a rank; {numbers}"]
    return []
