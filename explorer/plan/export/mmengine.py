"""OpenMMLab's MMEngine: a list of module names in the configuration of a run."""

from __future__ import annotations

from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

MMENGINE = Target(name="mmengine", written_for="MMEngine of 2025-10 (2543429)")


def to_mmengine(file: PolicyFile) -> Export:
    names = "".join(f"    {fqn!r},\n" for fqn in MMENGINE.recomputed(file.policy))
    text = f"activation_checkpointing = [\n{names}]\n" if names else "activation_checkpointing = None\n"
    return MMENGINE.exported(file.policy, text, note="A block that is called with keyword arguments raises there.")
