"""n // s blocks to each of s segments, the rest at the end kept, for the best s: as torch parts a Sequential.

Where a model loops over a list, the segments that this explorer makes there take its place: torch's function wants a
Sequential.
"""

from __future__ import annotations

from explorer.errors import BadInput
from explorer.plan.arena.rival import Rival, Situation
from explorer.plan.policy.counted import runs
from explorer.record.policy import Policy


def _choose(situation: Situation, budget_bytes: int) -> Policy:
    units = situation.units
    if max(len(stretch) for stretch in runs(units, situation.graph)) == 1 and all(len(unit) == 1 for unit in units):
        raise BadInput("No two blocks of this model hand on to each other alone, so it has no segments.")
    blocks = [fqn for unit in units for fqn in unit]
    by_segments = {}
    for n_segments in range(1, len(blocks) + 1):
        size = len(blocks) // n_segments
        segments = [tuple(blocks[i * size : (i + 1) * size]) for i in range(n_segments - 1)]
        by_segments[tuple(segments)] = situation.segments(segments)
    return situation.cheapest_that_fits(by_segments.values(), budget_bytes)


RIVAL = Rival(
    title="checkpoint_sequential, best number",
    source="torch.utils.checkpoint.checkpoint_sequential",
    place=4,
    choose=_choose,
)
