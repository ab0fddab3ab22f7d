"""The results of a planner: predicted figures of a policy, the price of a block, and a plan with its certificate.

`Plan` is a predicted policy under a budget. `AutoPlan` adds what real steps under it measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

from explorer.errors import BadInput
from explorer.record.base import Record
from explorer.record.card import CardMemory
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, outermost


class Forecast(Record):
    """Figures of a policy predicted from a measured baseline; None: not predicted."""

    step_peak_bytes: int | None = None
    saved_after_forward_bytes: int | None = None
    flop_ratio: float | None = None
    """FLOPs of the step over those of the baseline; an upper bound, early stop skips some."""
    time_ratio: float | None = None
    """Step time over the baseline's."""
    time_ratio_spread: float | None = None
    """Half the width of the interval around `time_ratio` that should contain nine of ten runs."""
    time_ratio_of_calls: float | None = None
    """The part of `time_ratio` that is overhead of torch.utils.checkpoint per call."""
    freed_bytes: dict[str, int] = {}
    """Bytes that each recomputed block no longer saves, by block."""
    host_peak_bytes: int | None = None
    """Most bytes that offloaded tensors hold on the host; None: nothing is offloaded."""
    moved_bytes: int | None = None
    """Bytes that cross between device and host in a step, both ways; None: nothing is offloaded."""


class Price(Record):
    """The effect on a measured run of toggling one unit, everything else unchanged."""

    blocks: tuple[str, ...]
    """The unit: one block, or the consecutive blocks of a segment."""
    toggle: Literal["recompute", "keep"]
    """The action of the unit after the toggle."""
    peak_bytes: int
    """The peak of the step after the toggle."""
    peak_change_bytes: int
    """Below zero: the peak sinks."""
    share_of_step_flops: float | None
    """FLOPs that toggling adds (or, for `keep`, takes away) as a share of the step's; None: not counted."""

    @property
    def mib_per_percent(self) -> float | None:
        """MiB of peak bought (recompute) or given up (keep) for one percent of the step's FLOPs.

        None where the FLOPs are unknown or none; zero: the toggle does not move the peak.
        """
        if not self.share_of_step_flops:
            return None
        moved = -self.peak_change_bytes if self.toggle == "recompute" else self.peak_change_bytes
        return moved / 1024**2 / (100 * self.share_of_step_flops)


CostUnit = Literal["ms", "FLOPs"]
PCIE_4 = 31.5e9
"""Bytes a second that PCIe 4.0 x16 carries one way: 16 lanes of 16 GT/s, 128 of 130 bits data (PCI-SIG)."""
Bounded = Literal["requested", "reserved"]
_FLAT = ", nothing inside a segment"


class Certificate(Record):
    """The distance of a plan from the best plan: no policy made of the candidates costs less than `bound`.

    Costs are those of the forecast, from the measured time and memory of each block. `scope` names the candidates.
    """

    bound: float
    """Lower bound in the cost unit of the plan, or in bytes of the peak for a plan of least memory."""
    gap: float
    """Share of the plan's cost (or peak) by which it may lie above the bound: 0 is proven best."""
    n_candidates: int
    n_rows: int
    """Moments of the step that became rows of the program."""
    n_solves: int
    n_segments: int = 0
    """Number of candidates with several blocks."""
    n_keeping: int = 0
    """Number of candidates that keep the results of some operators."""
    n_offloading: int = 0
    """Number of candidates that are offloaded."""
    longest_segment: int = 0
    """Blocks of the longest segment; 0: written before this was counted."""
    inside_segments: bool = True
    """True if a unit may be recomputed inside a segment."""
    n_levels: int = 2
    """Levels of nested units in the plan itself. The bound is that of choices with two; a third is tried afterwards."""
    beside: str = ""
    """Scope of a second program, of all stretches of a chain, over whose choices the bound holds as well."""

    @property
    def scope(self) -> str:
        """`1 module and 496 segments of up to 32 blocks, at most one inside another`: what could be chosen."""
        n_modules = self.n_candidates - self.n_segments - self.n_keeping - self.n_offloading
        longest = self.longest_segment
        lengths = "up to" if self.n_segments >= longest * (longest - 1) // 2 else "some lengths up to"
        length = f" of {lengths} {longest} blocks" if longest else ""
        counted = [
            *([_count(n_modules, "module")] if n_modules or not self.n_candidates else []),
            *([f"{_count(self.n_segments, 'segment')}{length}"] if self.n_segments else []),
            *([f"{_count(self.n_keeping, 'way')} to keep results"] if self.n_keeping else []),
            *([f"{_count(self.n_offloading, 'block')} to offload"] if self.n_offloading else []),
        ]
        among = " and ".join(filter(None, (", ".join(counted[:-1]), counted[-1])))
        nested = ", at most one inside another" if n_modules > 1 else ""
        flat = "" if self.inside_segments or not self.n_segments else _FLAT
        deeper = f" (this plan nests {self.n_levels} levels)" if self.n_levels > 2 else ""
        adds = self.beside.removesuffix(_FLAT) not in ("", f"{among}{nested}")
        return f"{among}{nested}{deeper}{flat}{f', or {self.beside}' if adds else ''}"

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
    """The cost of recomputing, in `cost_unit`."""
    step_cost: float
    """The cost of the step without recompute."""
    cost_unit: CostUnit
    certificate: Certificate
    cost_ratio_spread: float | None = None
    """Half the width of the interval around `cost_ratio`, as of `Forecast.time_ratio_spread`; None: not in time."""
    flop_ratio: float | None = None
    budget_bytes: int | None = None
    """The requested budget; None: the least memory that the time allows."""
    bounded: Bounded = "requested"
    """What the budget bounds: bytes that tensors request, or bytes that a card's allocator reserves in the plan's run.
    The proof is about requested bytes in either case."""
    time_budget: float | None = None
    """Limit of the extra step time as a share; None: no limit."""
    host_peak_bytes: int | None = None
    """As of the Forecast, and so is the next."""
    moved_bytes: int | None = None
    host_bandwidth: float = 0.0
    """Bytes a second between device and host; 0: offload was not asked for."""
    recompute_in_interval: tuple[str, ...] = ()
    """Offloaded blocks that could be recomputed in the time that their copies may take."""

    @property
    def copies_ms(self) -> float:
        """Milliseconds of all copies of a step. They cost this if none runs beside the step, and nothing if all do."""
        return 1e3 * (self.moved_bytes or 0) / (self.host_bandwidth or math.inf)

    @property
    def cost_ratio(self) -> float | None:
        """The step under the plan over the step without recompute; no copy of an offloaded block runs beside it."""
        return 1 + self.extra_cost / self.step_cost if self.step_cost else None

    @property
    def least_cost_ratio(self) -> float:
        """As `cost_ratio`, if all copies run beside the step."""
        copies_cost = self.copies_ms * (self.cost_unit == "ms")
        return 1 + (self.extra_cost - copies_cost) / (self.step_cost or math.inf)

    @property
    def proven(self) -> bool:
        """True if no choice of candidates is cheaper by more than a thousandth."""
        return self.certificate.gap <= 1e-3


class Wish(Record):
    """The budget of a person: bytes, extra time as a share of the step, or the run's card; else the whole front."""

    budget_bytes: int | None = None
    more_time: float | None = None
    understood: str = ""
    """How the budget's text was read, in words; empty for a text with one meaning only."""
    time_scale: float = 1.0
    """Measured over predicted rerun time in runs of the same step: `more_time` is a share of measured time."""
    card: bool = False
    """What the card's allocator reserves stays within the card."""
    suggested: tuple[Policy, ...] = ()
    """Policies of plans that are shown: no plan for the wish is worse, and a refusal names no higher least peak."""


class Front(Record):
    """Plans of one measured step: from everything kept down to the least peak, or the one that was wished for."""

    plans: tuple[Plan, ...] = ()
    refusal: str = ""
    """Why no plan meets the budget that was wished for; the plan is then that of the least peak."""
    step: Measurement | None = None
    """The step under the plan for a card, predicted; None: the wish was no card."""


class Missed(Record):
    """A plan whose run was over the budget."""

    plan: Plan
    measured_peak_bytes: int | None
    """The peak of the run; None: the run ran out of memory."""


class AutoPlan(Record):
    """The plan of `explorer.auto_policy` for a user's own step, and the figures of its real steps."""

    plan: Plan
    measured_peak_bytes: int | None
    """The peak of the run; None: the run has no allocations."""
    n_steps: int
    """Number of real steps that the search took; all state that the steps moved is restored."""
    measured_time_ratio: float | None = None
    """Step time under the policy over that of keeping everything, in turns; None: keeping everything does not fit."""
    time_spread: float | None = None
    front: tuple[Plan, ...] = ()
    """Predicted plans for other budgets, from everything kept down to the lowest peak."""
    missed: tuple[Missed, ...] = ()
    refused: tuple[str, ...] = ()
    """Policies in words that did not fit on the device, such as `everything kept`."""
    refused_segments: tuple[tuple[str, ...], ...] = ()
    """Neighbours that the model refuses as one segment: no plan recomputes them together."""
    card: CardMemory | None = None
    """What the step under the plan holds on the card that is the budget; None: the budget is no card."""

    @property
    def policy(self) -> Policy:
        return self.plan.policy

    @property
    def certificate(self) -> Certificate:
        return self.plan.certificate

    @property
    def predicted_peak_bytes(self) -> int:
        return self.plan.step_peak_bytes

    @property
    def predicted_time_ratio(self) -> float | None:
        return self.plan.cost_ratio

    @property
    def kept(self) -> bool:
        """True if the measured peak is within the budget and the card refuses nothing; false for an unknown peak."""
        if self.card is not None and self.card.refused is not None:
            return False
        budget, peak = self.plan.budget_bytes, self.measured_peak_bytes
        return budget is None or (peak is not None and peak <= budget)

    def require(self) -> AutoPlan:
        """Returns the plan itself. Raises BadInput if the measured peak is above the budget."""
        if not self.kept:
            raise BadInput(self._miss, hint="Give a higher budget, or one that lies as much lower.")
        return self

    def __str__(self) -> str:
        """A missed budget first, then peak, time and certificate."""
        peak, ratio = self.measured_peak_bytes, self.measured_time_ratio
        measured = "not measured" if peak is None else f"{peak:,} bytes measured"
        time = "not measured" if ratio is None else f"x{ratio:.2f} measured"
        predicted = "" if self.predicted_time_ratio is None else f", x{self.predicted_time_ratio:.2f} predicted"
        lines = [
            *([] if self.kept else [self._miss]),
            *self._units,
            f"Peak: {measured}, {self.predicted_peak_bytes:,} predicted.",
            f"Step time: {time}{predicted}.",
            f"Certificate, of what is predicted: {self.certificate}; bounded: {self.plan.bounded} bytes.",
            *(f"The model refuses {' and '.join(blocks)} as one segment." for blocks in self.refused_segments),
            *([str(self.card)] if self.card is not None else []),
        ]
        return "\n".join(lines)

    @property
    def _units(self) -> Iterator[str]:
        """How many blocks the policy recomputes, and what those cost that it offloads."""
        offloaded = {fqn for unit in self.policy.units if unit.action == "offload" for fqn in unit.blocks}
        yield f"{_count(len(outermost(set(self.policy.blocks) - offloaded)), 'block')} recomputed."
        if offloaded:
            yield (
                f"{_count(len(offloaded), 'block')} offloaded: {self.plan.host_peak_bytes or 0:,} bytes on the host, "
                f"predicted. Their copies take 0 to {self.plan.copies_ms:.3g} ms of a step."
            )

    @property
    def _miss(self) -> str:
        budget, peak = self.plan.budget_bytes or 0, self.measured_peak_bytes
        if self.card is not None and self.card.refused is not None:
            return f"The plan misses its card, {self.card.card.name}, which refuses a request of its step."
        if peak is None:
            return f"The plan has a budget of {budget:,} bytes, and its run holds no peak."
        return f"The plan misses its budget of {budget:,} bytes: its step held {peak:,}, {peak - budget:,} more."


class Progress(Record):
    """`done` of `total` steps; `what` is the step under way, in words for a person."""

    what: str
    done: int
    total: int
    plans: tuple[Plan, ...] = ()
    """Found so far, by work that finds one after another."""
    part: bytes = b""
    """msgpack of the job's result as far as it is complete, in the first report after a part of it is there; else
    empty. A Measurement then lacks its times; a Comparison lacks evidence of its verdict, times, or both."""


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """A Report that drops every message."""
