"""torch's own integer program: which modules recompute, and what share of their activations each gives up."""

from explorer.plan.arena.rival import Rival

RIVAL = Rival(title="torch sac_milp", source="torch.distributed._tools.sac_ilp.sac_milp", place=8, module="sac_milp")
