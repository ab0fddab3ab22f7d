"""Every block is recomputed: what most training scripts switch on."""

from explorer.plan.arena.rival import Rival
from explorer.plan.policy.presets import preset

RIVAL = Rival(
    title="Recompute all",
    source="the flag of most frameworks",
    place=1,
    choose=lambda situation, budget: preset("all", situation.graph),
    takes_budget=False,
)
