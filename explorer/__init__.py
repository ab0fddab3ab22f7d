"""Checkpoint Explorer: what activation checkpointing buys, what it costs, and whether the gradient is still the same.

    policy = explorer.load_policy("policy.yaml")
    handle = explorer.apply_policy(model, policy)
    handle.undo()

Importing this package is cheap: torch is imported by the first call that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from explorer.errors import brings
from explorer.record.policy import Policy, Unit

if TYPE_CHECKING:
    from explorer.engine.policy.apply import apply_policy
    from explorer.engine.policy.units import is_recomputing
    from explorer.own_loop.auto_policy import auto_policy
    from explorer.own_loop.judge import audit, judge
    from explorer.own_loop.record_step import record_step
    from explorer.own_loop.trainers import HuggingFaceCallback, LightningCallback
    from explorer.own_loop.watch import watch
    from explorer.plan.policy.file import load_policy

__all__ = [
    "HuggingFaceCallback",
    "LightningCallback",
    "Policy",
    "Unit",
    "apply_policy",
    "audit",
    "auto_policy",
    "is_recomputing",
    "judge",
    "load_policy",
    "record_step",
    "watch",
]
__version__ = "0.1.0"

_WHERE = {
    "HuggingFaceCallback": "explorer.own_loop.trainers",
    "LightningCallback": "explorer.own_loop.trainers",
    "apply_policy": "explorer.engine.policy.apply",
    "audit": "explorer.own_loop.judge",
    "auto_policy": "explorer.own_loop.auto_policy",
    "is_recomputing": "explorer.engine.policy.units",
    "judge": "explorer.own_loop.judge",
    "load_policy": "explorer.plan.policy.file",
    "record_step": "explorer.own_loop.record_step",
    "watch": "explorer.own_loop.watch",
}


def __getattr__(name: str) -> object:
    if name in _WHERE:
        try:
            return getattr(import_module(_WHERE[name]), name)
        except ModuleNotFoundError as missing:
            missing.add_note(f"explorer.{name} needs {missing.name}: {brings(str(missing.name))}.")
            raise
    raise AttributeError(f"module 'explorer' has no attribute {name!r}")
