"""Where a recompute first departs from forward: the first operator with another result, and the line that called it.

Operators of a block are compared in order, call by call. A recompute belongs to the latest forward of the block that
has no recompute yet. checkpoint_error.py answers an error of torch after the fact; this file has watched the forward.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from explorer.engine.state.bits import contents, tensor_leaves
from explorer.engine.state.state_diff import short_text
from explorer.engine.watch.lines import line_of_model
from explorer.record.late_read import Departure

_NOT_COMPARED = ("aten.detach.", "aten.alias.", "aten.empty", "aten.new_empty", "prim.")
"""Operators of torch's own checkpoint, which packs what the recompute saves, and operators without a result."""


class _Result(NamedTuple):
    operator: str
    sums: tuple[int, ...]
    text: str
    line: str


class Departures:
    """Collects `by_block`: the first departure of each block in which a recompute departs, first in time first."""

    def __init__(self) -> None:
        self.by_block: dict[str, Departure] = {}
        self._forwards: dict[int, list[list[_Result]]] = defaultdict(list)
        self._open: list[tuple[int, list[_Result], list[_Result] | None]] = []
        """Running calls: block, results so far, and the results of the forward that the call repeats."""

    def entered(self, block: int) -> None:
        waiting = self._forwards[block]
        results: list[_Result] = []
        if torch._C._current_graph_task_id() == -1:
            waiting.append(results)
            self._open.append((block, results, None))
        else:
            self._open.append((block, results, waiting.pop() if waiting else None))

    def left(self, block: int) -> None:
        if self._open and self._open[-1][0] == block:
            self._open.pop()

    def ran(self, operator: object, result: object, block: str) -> None:
        """Notes an operator, or compares it with the operator of the forward at the same place.

        A result whose bits cannot be read ends the comparison of its call: no exception may leave a dispatch mode.
        """
        name = str(operator)
        if not self._open or name.startswith(_NOT_COMPARED):
            return
        index, results, forward = self._open[-1]
        try:
            with torch.no_grad(), _disable_current_modes():
                now = _Result(name, _sums(result), _text(result), line_of_model())
        except Exception:  # a kind of tensor that no kernel sums
            self._open[-1] = index, results, None
            return
        results.append(now)
        if forward is None or block in self.by_block or len(results) > len(forward):
            return
        before = forward[len(results) - 1]
        if (before.operator, before.sums) != (now.operator, now.sums):
            self.by_block[block] = Departure(
                block=block,
                operator=now.operator,
                in_forward=before.text,
                in_recompute=now.text,
                line=now.line,
                instead_of=before.operator if before.operator != now.operator else "",
            )


def _sums(result: object) -> tuple[int, ...]:
    return tuple(int(bits.sum(dtype=torch.int32)) for leaf in tensor_leaves(result) for bits in contents(leaf))


def _text(result: object) -> str:
    tensor = next(iter(tensor_leaves(result)), None)
    return short_text(tensor.detach()) if tensor is not None else short_text(result)
