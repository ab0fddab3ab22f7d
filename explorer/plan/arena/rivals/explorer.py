"""The planner of `python -m explorer plan`: every module a candidate, an integer program over the measured timeline."""

from explorer.plan.arena.rival import Rival

RIVAL = Rival(
    title="This explorer",
    source="python -m explorer plan",
    place=7,
    choose=lambda situation, budget: situation.planner.within(budget).policy,
)
