"""The schedules by name, one row each, and the rows of actions that a plan runs.

A new schedule is a row of SCHEDULES and a function that writes its actions (orders.py): the command line, the page and
the hazards read the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from explorer.errors import InvalidPlan, nearest
from explorer.plan.pipeline.actions import Rows, check_rows, parse_rows
from explorer.plan.pipeline.orders import (
    dual_pipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    n_rounds,
    one_f_one_b,
    zbv_zero_bubble,
)
from explorer.record.graph import ModelGraph
from explorer.record.run import PipelinePlan


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
        generate=lambda p, m, v: interleaved(p, m, v),
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
