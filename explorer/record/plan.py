"""A policy that a planner found, what it is said to do, and the proof that none is cheaper."""

from __future__ import annotations

import math
from typing import Literal

from explorer.record.base import Record
from explorer.record.pipeline_plan import PipelinePlan
from explorer.record.policy import Policy

CostUnit = Literal["ms", "FLOPs"]


class Certificate(Record):
    """How far a plan may be from the best one: no policy made of the candidates costs less than `bound`.

    It speaks of the forecast: the time and the memory of each block as they were measured. `scope` names the choices.
    """

    bound: float
    """In the plan's cost unit; of a plan for the least memory the bytes of the peak."""
    gap: float
    """Share of the plan's cost (or peak) by which it may lie above the bound: 0 is proven best."""
    n_candidates: int
    """Units that could be chosen, all of them."""
    n_rows: int
    """Moments of the step that the program had to look at."""
    n_solves: int
    n_segments: int = 0
    """Candidates that are several blocks in one."""
    n_keeping: int = 0
    """Candidates that keep the results of some operators."""
    longest_segment: int = 0
    """Blocks of the longest segment; 0: written before this was counted."""
    inside_segments: bool = True
    """Whether a unit may be recomputed inside a segment."""

    @property
    def scope(self) -> str:
        """`1 module and 496 segments of up to 32 blocks, at most one inside another`: what could be chosen."""
        n_modules = self.n_candidates - self.n_segments - self.n_keeping
        length = f" of up to {self.longest_segment} blocks" if self.longest_segment else ""
        counted = [
            *([_count(n_modules, "module")] if n_modules or not self.n_candidates else []),
            *([f"{_count(self.n_segments, 'segment')}{length}"] if self.n_segments else []),
            *([f"{_count(self.n_keeping, 'way')} to keep results"] if self.n_keeping else []),
        ]
        among = " and ".join(filter(None, (", ".join(counted[:-1]), counted[-1])))
        flat = "" if self.inside_segments or not self.n_segments else ", nothing inside a segment"
        return f"{among}{', at most one inside another' if n_modules > 1 else ''}{flat}"

    def __str__(self) -> str:
        """`within 0.01 % of the best choice among 24 modules, at most one inside another, in 3 solves`.

        The gap is rounded up.
        """
        among = f"among {self.scope}"
        solves = f"in {self.n_solves:,} solve{'s' * (self.n_solves != 1)}"
        if self.gap >= 1:
            return f"the best that was found {among}, {solves}; nothing is proven"
        if self.gap <= 0:
            return f"proven the best choice {among}, {solves}"
        return f"within {math.ceil(1e4 * self.gap) / 100:g} % of the best choice {among}, {solves}"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


class Plan(Record):
    """The cheapest policy under a budget, predicted from one measured step."""

    policy: Policy
    step_peak_bytes: int
    baseline_step_peak_bytes: int
    extra_cost: float
    """What recomputing takes, in `cost_unit`."""
    step_cost: float
    """The cost of the step without recompute."""
    cost_unit: CostUnit
    certificate: Certificate
    cost_ratio_spread: float | None = None
    """Half the width of the interval around `cost_ratio`, as of `Forecast.time_ratio_spread`; None: not in time."""
    flop_ratio: float | None = None
    budget_bytes: int | None = None
    """What was asked for; None: the least memory that the time allows."""
    time_budget: float | None = None
    """Most that the step may take longer, as a share; None: whatever the budget needs."""

    @property
    def cost_ratio(self) -> float | None:
        """The step under the plan over the step without recompute."""
        return 1 + self.extra_cost / self.step_cost if self.step_cost else None

    @property
    def proven(self) -> bool:
        """Whether nothing among the candidates is cheaper by more than a thousandth."""
        return self.certificate.gap <= 1e-3


class Wish(Record):
    """What a person has to spend: bytes, or time as a share of the step; neither: whatever there is to choose from."""

    budget_bytes: int | None = None
    more_time: float | None = None


class Front(Record):
    """Plans of one measured step: from everything kept down to the least peak, or the one that was wished for."""

    plans: tuple[Plan, ...] = ()
    refusal: str = ""
    """Why no plan meets the budget that was wished for; the plan is then that of the least peak."""


class CapWish(Record):
    """A pipeline that keeps every rank below a cap: what is fixed, and what may be chosen."""

    asked: PipelinePlan
    """The number of stages, ranks, schedule and switches; the blocks of its stages say nothing."""
    cap_bytes: int
    n_microbatches: int | None = None
    """None: as many as serve best."""


class JointPlan(Record):
    """Cuts, microbatches and policy of a pipeline chosen together, so that every rank stays below a cap."""

    plan: PipelinePlan
    policy: Policy
    cap_bytes: int
    makespan_ms: float
    """Predicted, like everything here."""
    rank_bytes: tuple[int, ...]
    """What each rank's device has to hold: its peak and the optimizer's state."""
    cuts_first_ms: float | None
    """The quickest step of an even cut (by parameters, time or memory) whose policy is chosen afterwards; None: no such
    plan fits."""
    n_judged: int
    """Plans whose step was played."""
    bound_ms: float = 0.0
    """By the same prices no plan below the cap has a quicker step, whatever its cuts, microbatches and policy."""

    @property
    def gap(self) -> float:
        """Share of the step by which it may lie above the bound: 0 is proven best."""
        return max(1 - self.bound_ms / self.makespan_ms, 0.0) if self.makespan_ms else 0.0
