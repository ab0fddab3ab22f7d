"""What a plan may claim, and the refusal of a budget: both name the choices that were looked at."""

from __future__ import annotations

import math

from explorer.errors import BadInput
from explorer.plan.memory.ledger import holders, in_place
from explorer.plan.memory.outside import outside_modules
from explorer.plan.names import outermost
from explorer.plan.planners.candidates import Candidates
from explorer.plan.planners.program import ForecastChoices, Program, Solution
from explorer.plan.planners.solver import TOLERANCE
from explorer.plan.sizes import distinct_texts, mib, mib_up
from explorer.record.allocations import Ledger
from explorer.record.plan import Certificate, Plan, Wish
from explorer.record.policy import Policy, Unit


def certificate_of(program: ForecastChoices, solution: Solution) -> Certificate:
    """The bound of a solution, and how many choices it holds for."""
    units, around = list(program.candidates.number), program.candidates.around
    lengths = [len(unit.blocks) for unit in units if len(unit.blocks) > 1 and not unit.save_ops]
    return Certificate(
        bound=solution.bound,
        gap=solution.gap,
        n_candidates=len(units),
        n_rows=solution.n_rows,
        n_solves=solution.n_solves,
        n_segments=len(lengths),
        n_keeping=sum(bool(unit.save_ops) for unit in units),
        n_offloading=sum(unit.action == "offload" for unit in units),
        longest_segment=max(lengths, default=0),
        inside_segments=isinstance(program, Program),
        n_levels=max([2, *(1 + len(set(solution.chosen).intersection(around[i])) for i in solution.chosen)]),
    )


def refusal(budget_bytes: int, floor: Plan, fixed: int, at: Ledger | None) -> BadInput:
    """Why no policy of those looked at reaches the budget. `fixed`: bytes that none frees; `at`: the floor's peak."""
    least = floor.step_peak_bytes
    alone = f"; parameters, optimizer state, gradients and inputs alone hold {mib(fixed)}"
    n_blocks = len(outermost(floor.policy.blocks))
    done = "recomputed" if floor.moved_bytes is None else "recomputed or offloaded"
    recomputed = f", with {n_blocks or 'no'} block{'s' * (n_blocks != 1)} {done}"
    why = "" if at is None else f"That is held {in_place(at)}: {holders(at)}. {outside_modules(at)}".strip()
    budget, reached = distinct_texts(budget_bytes, least)
    certificate = floor.certificate
    # The bound holds for two levels of nesting only.
    bound = certificate.bound if certificate.n_levels == 2 else 0.0
    brings = "brings" if max(bound, fixed) > budget_bytes else "was found that brings"
    can_be_reached = "can be reached" if bound and certificate.gap <= TOLERANCE else "was found"
    # What no recompute can free holds for every policy, and what the search found for the choices it looked at.
    no_policy = "No policy" if budget_bytes < fixed else f"Among {certificate.scope}, no policy"
    return BadInput(
        f"{no_policy} {brings} this step below {budget}: the least that {can_be_reached} is {reached}"
        f"{alone if budget_bytes < fixed else recomputed}. {why}".strip(),
        hint=f"Ask for {mib_up(least)} or more, or take a smaller batch.",
    )


def recompute_in_interval(candidates: Candidates, policy: Policy) -> tuple[str, ...]:
    """Offloaded blocks whose recompute takes no longer than their copies may take."""
    costs = {candidate.unit: candidate.cost for candidate in candidates.units}
    offloaded = [unit for unit in policy.units if unit.action == "offload"]
    again = {unit: costs.get(Unit(blocks=unit.blocks), math.inf) for unit in offloaded}
    return tuple(unit.blocks[0] for unit in offloaded if again[unit] <= costs[unit])


def not_both(wish: Wish, plan: Plan, quick: Plan) -> BadInput:
    """Why no policy meets a wish of memory and time. `plan` meets the memory, `quick` the time."""
    more_time = 100 * ((plan.cost_ratio or 1.0) - 1) * wish.time_scale
    budget, least = mib(wish.budget_bytes or 0), mib_up(quick.step_peak_bytes)
    allowed = f"+{100 * (wish.more_time or 0.0):g} % time"
    return BadInput(
        f"No policy found needs at most {budget} and {allowed}: within {budget} the cheapest takes "
        f"{more_time:+.1f} %, and within {allowed} the least peak is {least}.",
        hint=f"Ask for {least}, or for +{math.ceil(more_time)} % time.",
    )
