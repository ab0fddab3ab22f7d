"""Nothing is recomputed: what everybody else is held against."""

from explorer.plan.arena.rival import Rival
from explorer.record.policy import KEEP_ALL

RIVAL = Rival(
    title="Keep all", source="no checkpointing", place=0, choose=lambda situation, budget: KEEP_ALL, takes_budget=False
)
