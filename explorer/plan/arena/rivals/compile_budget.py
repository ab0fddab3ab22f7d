"""torch.compile, whose partitioner decides operator by operator under a share of what would be saved."""

from explorer.plan.arena.rival import Rival

RIVAL = Rival(
    title="torch.compile with a memory budget",
    source="torch._functorch.config.activation_memory_budget",
    place=9,
    module="compile_budget",
)
