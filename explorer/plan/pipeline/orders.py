"""The action list of each schedule that torch has: the order of actions on each rank.

Generated here rather than by torch, because the page predicts without torch and because torch's own listing of 1F1B
is not what it runs. The lists equal torch's, action for action, 1F1B excepted (test_in_process.py).
"""

from __future__ import annotations

from collections import defaultdict, deque

from explorer.plan.pipeline.actions import Action, Rows


def gpipe(n_ranks: int, n_microbatches: int) -> Rows:
    """GPipe: all forwards, then all backwards."""
    return tuple(
        tuple(Action(rank, kind, i) for kind in "FB" for i in range(n_microbatches)) for rank in range(n_ranks)
    )


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Rows:
    """Fill the pipeline, then one forward, one backward; at most min(m, p - r) microbatches in flight on rank r."""
    rows = []
    for rank in range(n_ranks):
        n_warmup = min(n_microbatches, n_ranks - 1 - rank)
        row = [Action(rank, "F", i) for i in range(n_warmup)]
        for i in range(n_microbatches):
            if i + n_warmup < n_microbatches:
                row.append(Action(rank, "F", i + n_warmup))
            row.append(Action(rank, "B", i))
        rows.append(tuple(row))
    return tuple(rows)


def looped_bfs(n_ranks: int, n_microbatches: int, n_local: int = 2) -> Rows:
    """GPipe over looped stages: a rank finishes all microbatches of a stage before its next; backward mirrors it."""
    rows = []
    for rank in range(n_ranks):
        forward = [
            Action(stage, "F", i) for stage in range(rank, n_ranks * n_local, n_ranks) for i in range(n_microbatches)
        ]
        rows.append((*forward, *(Action(done.stage, "B", done.microbatch) for done in reversed(forward))))
    return tuple(rows)


def interleaved(n_ranks: int, n_microbatches: int, n_local: int = 2, *, zero_bubble: bool = False) -> Rows:
    """Interleaved 1F1B; with `zero_bubble` its backward is split and W fills the gaps (ZB1P).

    Microbatches go in `n_rounds` rounds, of equal size.
    """
    return tuple(_interleaved_row(rank, n_ranks, n_microbatches, n_local, zero_bubble) for rank in range(n_ranks))


def n_rounds(n_ranks: int, n_microbatches: int) -> int:
    """Number of rounds of an interleaved schedule: about one for every `n_ranks` microbatches."""
    return max(1, n_microbatches // n_ranks)


def _interleaved_row(
    rank: int, n_ranks: int, n_microbatches: int, n_local: int, zero_bubble: bool
) -> tuple[Action, ...]:
    per_round = n_microbatches // n_rounds(n_ranks, n_microbatches)
    n_ops = n_local * n_microbatches
    hops = (1 if zero_bubble else 2) * (n_ranks - 1 - rank)
    n_warmup = min((n_local - 1) * per_round + hops, n_ops)
    # Op k of a rank belongs to local stage (k // per_round) mod n_local; backward visits the local stages in reverse.
    local = [(k // per_round) % n_local for k in range(n_ops)]
    forward = _numbered("F", [rank + n_ranks * j for j in local])
    backward = _numbered("I" if zero_bubble else "B", [rank + n_ranks * (n_local - 1 - j) for j in local])
    row = forward[:n_warmup]
    n_weights = 0
    for k, back in enumerate(backward):
        if n_warmup + k < n_ops:
            row.append(forward[n_warmup + k])
        row.append(back)
        if zero_bubble and k >= rank:
            row.append(backward[n_weights]._replace(kind="W"))
            n_weights += 1
    row += [back._replace(kind="W") for back in backward[n_weights:]] if zero_bubble else []
    return tuple(row)


def _numbered(kind: str, stages: list[int]) -> list[Action]:
    """Actions of `kind` on `stages` in order, each stage counting its own microbatches from 0."""
    counts: defaultdict[int, int] = defaultdict(int)
    actions = []
    for stage in stages:
        actions.append(Action(stage, kind, counts[stage]))
        counts[stage] += 1
    return actions


class _Recorder:
    """Writes one rank's row of a V schedule: chunk 0 goes down the V, chunk 1 comes back up."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        self.stages = (rank, 2 * n_ranks - 1 - rank)
        self.row: list[Action] = []
        self.counts: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.owed: deque[Action] = deque()
        """Weight gradients not yet written, oldest first."""

    def do(self, kind: str, chunk: int) -> None:
        counter = (chunk, "F" if kind == "F" else "back")
        action = Action(self.stages[chunk], kind, self.counts[counter])
        self.counts[counter] += 1
        self.row.append(action)
        if kind == "I":
            self.owed.append(Action(action.stage, "W", action.microbatch))

    def weight(self, chunk: int | None = None) -> None:
        """The oldest weight gradient owed (of `chunk`); nothing where none is owed."""
        for action in self.owed:
            if chunk is None or action.stage == self.stages[chunk]:
                self.owed.remove(action)
                self.row.append(action)
                return


def zbv_zero_bubble(n_ranks: int, n_microbatches: int) -> Rows:
    """Zero bubble over a V of two stages a rank; memory held as in 1F1B."""
    rows = []
    n_padded = max(2 * n_ranks - 1, n_microbatches)
    for rank in range(n_ranks):
        write = _Recorder(rank, n_ranks)
        for _ in range(2 * (n_ranks - rank) - 1):
            write.do("F", 0)
        for _ in range(rank):
            write.do("F", 1)
            write.do("F", 0)
        for _ in range(n_ranks - rank):
            for kind in "FI":
                write.do(kind, 1)
            write.weight(1)
        while write.counts[1, "F"] < write.counts[0, "F"] or write.counts[0, "F"] < n_padded:
            if write.counts[0, "F"] < n_padded:
                write.do("F", 0)
            write.do("I", 0)
            write.weight(0)
            for kind in "FI":
                write.do(kind, 1)
            write.weight(1)
        for _ in range(rank):
            write.do("I", 0)
            write.do("I", 1)
        for _ in range(n_ranks - rank):
            write.do("I", 0)
            write.weight(0)
        for chunk in (1, 0):
            for _ in range(len(write.owed)):
                write.weight(chunk)
        rows.append(tuple(action for action in write.row if action.microbatch < n_microbatches))
    return tuple(rows)


def dual_pipe_v(n_ranks: int, n_microbatches: int) -> Rows:
    """DualPipe folded into a V of two stages a rank: forwards of one chunk beside backwards of the other."""
    rows = []
    for rank in range(n_ranks):
        write = _Recorder(rank, n_ranks)
        after = n_ranks - 1 - rank
        for _ in range(2 * after):
            write.do("F", 0)
        for _ in range(rank + 1):
            write.do("F", 0)
            write.do("F", 1)
        for _ in range(after):
            write.do("I", 1)
            write.weight()
            write.do("F", 1)
        for _ in range(n_microbatches - 2 * n_ranks + rank + 1):
            for kind, chunk in (("F", 0), ("B", 1), ("F", 1), ("B", 0)):
                write.do(kind, chunk)
        for _ in range(after):
            for kind, chunk in (("B", 1), ("F", 1), ("B", 0)):
                write.do(kind, chunk)
        # Half-way through the last rank + 1 rounds the backward is split, so that W can fill the drain.
        n_full = 2 * ((rank + 1) // 2) + (1 - rank % 2)
        for k in range(2 * (rank + 1)):
            write.do("B" if k < n_full else "I", 1 - k % 2)
        for _ in range(after):
            write.weight()
            write.do("I", 0)
        for _ in range(rank + 1):
            write.weight()
        rows.append(tuple(write.row))
    return tuple(rows)
