"""Objects that a rank broadcasts to others. NCCL's stub carries no values, so the ranks' store carries the objects.

Only a process that sees the card imports torch, so this file is apart from run.py.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from unittest.mock import patch

from torch import distributed
from torch.distributed import ProcessGroup, distributed_c10d


@contextmanager
def broadcast_objects() -> Iterator[None]:
    """Replaces `torch.distributed.broadcast_object_list` until the exit."""
    numbers = defaultdict[str, Iterator[int]](count)

    def broadcast(
        object_list: list[object],
        src: int | None = None,
        group: ProcessGroup | None = None,
        device: object = None,
        group_src: int | None = None,
    ) -> None:
        group = group or distributed_c10d._get_default_group()
        source = src or 0 if group_src is None else distributed.get_global_rank(group, group_src)
        key = f"objects {group.group_name} {next(numbers[group.group_name])}"
        store = distributed_c10d._get_default_store()
        if distributed.get_rank() == source:
            store.set(key, pickle.dumps(object_list))  # type: ignore[arg-type]
        else:
            object_list[:] = pickle.loads(store.get(key))

    with patch.object(distributed, "broadcast_object_list", broadcast):
        yield
