"""The dynamic program of Rotor on the measured chain of blocks.

It knows the chain alone: what else the step holds is taken off the budget as a constant, the peak with everything kept
less what the blocks save. A policy nests by the tree of modules, so a schedule with segments inside segments is not
sayable: where that is what Rotor answers, its best schedule without is taken, and said.
"""

from __future__ import annotations

from explorer.errors import BadInput
from explorer.plan.arena.rival import Rival, Situation
from explorer.plan.planners.rotor import HeterogeneousChain, cheapest_schedule
from explorer.plan.sizes import mib
from explorer.record.policy import Policy


def _choose(situation: Situation, budget_bytes: int) -> Policy:
    units = situation.units
    chain = _chain(situation)
    room = budget_bytes - (situation.keep_all_bytes - sum(chain.saved_bytes))
    schedule = cheapest_schedule(chain, room)
    if schedule is not None and schedule.is_nested:
        schedule = cheapest_schedule(chain, room, nested=False)
    if schedule is None:
        raise BadInput(f"It finds no schedule without segments inside segments: it counts {mib(max(0, room))} of room.")
    return situation.segments(
        tuple(fqn for unit in units[piece.first : piece.end] for fqn in unit) for piece in schedule.pieces
    )


def _chain(situation: Situation) -> HeterogeneousChain:
    """Raises BadInput where more than one tensor goes from a block to the next."""
    after = {cut.after: cut for cut in situation.graph.cuts}
    outputs = []
    for unit in situation.units:
        cut = after.get(unit[-1])
        if cut is None or cut.n_tensors != 1:
            crossing = "an unknown number of tensors" if cut is None else f"{cut.n_tensors} tensors"
            raise BadInput(f"It plans chains, and {crossing} cross behind {unit[-1]}.")
        outputs.append(cut.n_bytes)
    return HeterogeneousChain(
        forward_ms=tuple(map(situation.forward_ms, situation.units)),
        saved_bytes=tuple(map(situation.saved_bytes, situation.units)),
        output_bytes=tuple(outputs),
    )


RIVAL = Rival(
    title="Rotor",
    source="Beaumont et al. 2019, Optimal checkpointing for heterogeneous chains, arXiv:1911.13214",
    place=6,
    choose=_choose,
)
