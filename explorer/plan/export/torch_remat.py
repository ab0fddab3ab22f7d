"""The export to torch_remat, apart from python_files.py, which is full: whole blocks, and a hook for the generators.

torch_remat sets no generator back by itself, so the written file brings the hook that does.
"""

from __future__ import annotations

from explorer.plan.export.python_files import python_file
from explorer.plan.export.target import Target
from explorer.plan.names import above
from explorer.record.policy_file import Export, PolicyFile

TORCH_REMAT = Target(
    name="torch-remat",
    written_for="torch_remat 0.2.2",
    options=("preserve_rng_state", "determinism_check"),
    fixed=(("early_stop", False),),
    nested=False,
    checked="executed",
)


def to_torch_remat(file: PolicyFile) -> Export:
    """Whole blocks, each a region of its name. A block inside another one is left to the outer block."""
    named = set(file.policy.blocks)
    blocks = [fqn for fqn in TORCH_REMAT.recomputed(file.policy) if named.isdisjoint(above(fqn))]
    options = {name: getattr(file.policy, name) for name in ("preserve_rng_state", "determinism_check")}
    note = "A block returns tensors, or one tuple or list of them: torch_remat takes nothing else."
    return TORCH_REMAT.exported(file.policy, python_file(_ABOUT, _BODY, blocks, options), note=note)


_ABOUT = """\
Activation checkpointing by torch_remat.

    replay_blocks(model)      # once, after the model is built and before it is compiled or wrapped

remat.region(..., recompute=False) inside a block keeps what the model's own code marks.
"""
_BODY = """\
import torch
import torch_remat as remat


class Generators:
    \"\"\"Sets the generators of torch to those of forward for a replay. torch_remat sets them back behind it.\"\"\"

    def snapshot(self):
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self, state):
        torch.set_rng_state(state[0])
        if state[1]:
            torch.cuda.set_rng_state_all(state[1])


HOOKS = (Generators(),) if OPTIONS.pop("preserve_rng_state") else ()


def replay(name, block):
    \"\"\"Its forward, run again in backward. A second call changes nothing.\"\"\"
    if getattr(block.forward, "replayed", False):
        return
    region = remat.checkpoint(region_name=name, recompute_state_hooks=HOOKS, **OPTIONS)
    block.forward = region(block.forward)
    block.forward.replayed = True


def replay_blocks(model):
    for name, block in chosen(model).items():
        replay(name, block)
"""
