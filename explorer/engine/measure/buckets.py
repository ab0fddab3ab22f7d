"""Role of DistributedDataParallel's buckets, which hold the gradients and stay in memory.

DDP rebuilds its buckets in its second forward. By lifetime alone, buckets look like saved activations of model size.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import FORWARD, OP_COLUMNS, Tracker
from explorer.record.allocations import ROLES

EMPTY = "aten.empty.memory_format"
GRADIENT = ROLES.index("gradient")


def tag_buckets(model: nn.Module, tracker: Tracker) -> None:
    """Tags the storages that DDP's forward allocated and still holds as gradients. Call before the tracker forgets."""
    wrappers = {fqn for fqn, module in model.named_modules() if isinstance(module, DistributedDataParallel)}
    blocks = {number for number, fqn in enumerate(tracker.fqns) if fqn in wrappers}
    if not blocks:
        return
    seen = tracker.storages
    for index, op in enumerate(seen.made_by):
        if op == NONE or seen.role[index] != NONE or seen.died_ns[index] != NONE:
            continue
        name, block, phase, *_ = tracker.ops[op * len(OP_COLUMNS) : (op + 1) * len(OP_COLUMNS)]
        if block in blocks and phase == FORWARD and tracker.op_names[name] == EMPTY:
            seen.role[index], seen.owner[index] = GRADIENT, block
