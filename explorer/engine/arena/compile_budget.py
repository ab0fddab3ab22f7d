"""torch.compile under `activation_memory_budget`: it keeps at most that share of what it would save.

The share is of saved activations and not of the peak. So it is what the budget leaves for them: the budget less all
that the step holds beside them at its peak. Dropout draws as in eager mode, else no gradient could be compared.
"""

from __future__ import annotations

import torch
import torch._functorch.config
import torch._inductor.config

from explorer.engine.arena.contestant import Contestant
from explorer.engine.step import Trainee
from explorer.record.arena import Bout, Ground


def contestant(trainee: Trainee, bout: Bout, ground: Ground) -> Contestant:
    """Compiles at its first step. The settings are this process's, which ends with the bout."""
    assert bout.budget_bytes is not None, "it takes a budget"
    left = bout.budget_bytes - (ground.peak_bytes - ground.saved_bytes)
    share = min(1.0, max(0.0, left / ground.saved_bytes)) if ground.saved_bytes else 1.0
    torch._functorch.config.activation_memory_budget = share
    torch._inductor.config.fallback_random = True
    torch.compiler.reset()
    trainee.model.compile()
    return Contestant(trainee=trainee, note=f"activation_memory_budget = {share:.2f}.")
