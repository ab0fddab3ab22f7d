"""About sqrt(n) segments of n blocks, or, where blocks cannot be joined, all but sqrt(n) of them."""

from explorer.plan.arena.rival import Rival
from explorer.plan.policy.presets import preset

RIVAL = Rival(
    title="√n",
    source="Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174",
    place=3,
    choose=lambda situation, budget: preset("sqrt", situation.graph),
    takes_budget=False,
)
