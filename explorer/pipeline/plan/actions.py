"""A schedule as short text: one row of actions a rank, in the grammar that torch's pipeline runtime reads.

    0F0 0F1     0B0 0B1       stage 0 runs forward of microbatches 0 and 1, then their backward
        1F0 1B0 1F1 1B1       stage 1 starts later; empty cells are waiting and carry no meaning

`2F0` forward, `2B0` full backward, `2I0` gradient of the stage's input, `2W0` gradient of its weights; B = I + W.

The three rules of an action list. A fault names the actions that break a rule.

(1) Every stage does every microbatch exactly once each way: F once; B once, or I and W once each.
(2) A stage lives on one rank, and there F comes before B or I, and I before W.
(3) At least one rank can always go on: no deadlock.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from explorer.errors import InvalidPlan
from explorer.plan.names import listed

WHOLE = ({"F", "B"}, {"F", "I", "W"})
EARLIER = {"B": "F", "I": "F", "W": "I"}
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One stage's forward (F), backward (B), input gradient (I) or weight gradient (W) of one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Triple = tuple[int, str, int]
"""An action as a bare tuple, to which it is equal: schedules have thousands, simulated on every click."""
Rows = tuple[tuple[Action, ...], ...]
"""Row r is what rank r does, in order."""


def parse_rows(rows: Iterable[Sequence[str]]) -> Rows:
    """Cells of text -> actions, empty cells left out. Raises InvalidPlan that names every bad cell at once."""
    parsed, faults = [], []
    for rank, row in enumerate(rows):
        actions: list[Action] = []
        for cell_index, cell in enumerate(row):
            if match := _ACTION.fullmatch(cell.strip()):
                actions.append(Action(int(match[1]), match[2], int(match[3])))
            elif cell.strip():
                faults.append(f"{cell.strip()!r} (rank {rank}, cell {cell_index})")
        parsed.append(tuple(actions))
    if faults:
        raise InvalidPlan(
            f"The schedule has {len(faults)} cells that are not actions: {', '.join(faults[:5])}.",
            hint="Write stage, kind and microbatch: 2F0, 2B0, 2I0 or 2W0.",
        )
    return tuple(parsed)


def format_rows(rows: Rows) -> tuple[tuple[str, ...], ...]:
    """The text of every action, as PipelinePlan.actions holds it."""
    return tuple(tuple(map(str, row)) for row in rows)


def to_csv(rows: Rows) -> str:
    """The rows as text, a line for each rank: the file that torch's runtime loads as `compute_only`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(format_rows(rows))
    return out.getvalue()


def stage_ranks(rows: Rows) -> dict[int, int]:
    """The rank of each stage, by stage number."""
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    return dict(sorted(rank_of.items()))


def check_rows(rows: Rows, *, n_stages: int, n_microbatches: int) -> None:
    """Raises InvalidPlan that names the actions at fault; returns nothing when the rules hold."""
    faults = [*_count_faults(rows, n_stages, n_microbatches), *_order_faults(rows)]
    if faults:
        raise InvalidPlan(
            f"The schedule breaks its rules: {listed(faults, 5, between='; ')}.",
            hint="Each stage does each microbatch exactly once each way, F before B (or I before W), on one rank.",
        )
    execution_order(rows)


def needs(action: Triple, n_stages: int) -> list[tuple[Triple, ...]]:
    """Actions required before `action`; any one action of each tuple suffices."""
    stage, kind, microbatch = action
    if kind == "F":
        return [((stage - 1, "F", microbatch),)] if stage else []
    if kind == "W":
        return [((stage, "I", microbatch),)]
    groups: list[tuple[Triple, ...]] = [((stage, "F", microbatch),)]
    if stage < n_stages - 1:
        groups.append(((stage + 1, "B", microbatch), (stage + 1, "I", microbatch)))
    return groups


def execution_order(rows: Rows) -> list[Action]:
    """All actions in one order that respects every need: what one process can run. Raises InvalidPlan on a deadlock.

    Time is counted in steps in which every rank does at most one action, so the order follows the pace of the ranks.
    """
    n_stages = _n_stages(rows)
    done: set[Triple] = set()
    order: list[Action] = []
    todo = {rank: list(reversed(row)) for rank, row in enumerate(rows) if row}
    while todo:
        ready = [rank for rank, row in todo.items() if not _missing(row[-1], done, n_stages)]
        if not ready:
            stuck = []
            for rank, row in todo.items():
                missing = " and ".join(str(Action(*triple)) for triple in _missing(row[-1], done, n_stages))
                stuck.append(f"rank {rank} waits at {row[-1]} for {missing}")
            raise InvalidPlan(f"The schedule deadlocks: {'; '.join(stuck)}.", hint="Reorder these rows.")
        step = [todo[rank].pop() for rank in ready]
        order += step
        done.update(step)
        for rank in ready:
            if not todo[rank]:
                del todo[rank]
    return order


def _n_stages(rows: Rows) -> int:
    return 1 + max((action[0] for row in rows for action in row), default=-1)


def _missing(action: Triple, done: set[Triple], n_stages: int) -> list[Triple]:
    """The first action of each required group without a done action."""
    return [either[0] for either in needs(action, n_stages) if done.isdisjoint(either)]


def _count_faults(rows: Rows, n_stages: int, n_microbatches: int) -> list[str]:
    counts = Counter(action for row in rows for action in row)
    faults = [f"{action} appears {n} times" for action, n in counts.items() if n > 1]
    for action in counts:
        if action.stage >= n_stages:
            faults.append(f"{action} names stage {action.stage} of {n_stages}")
        if action.microbatch >= n_microbatches:
            faults.append(f"{action} names microbatch {action.microbatch} of {n_microbatches}")
    kinds: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for stage, kind, i in counts:
        kinds[stage, i].add(kind)
    for stage in range(n_stages):
        for i in range(n_microbatches):
            has = kinds[stage, i]
            if has in WHOLE:
                continue
            if "F" not in has:
                faults.append(f"{stage}F{i} is missing")
            if not has & set("BIW"):
                faults.append(f"{stage}B{i} is missing")
            elif "B" in has and has & set("IW"):
                faults.append(f"{stage}B{i} is there beside {stage}I{i} or {stage}W{i}")
            elif "B" not in has and not {"I", "W"} <= has:
                faults.append(f"{stage}{'W' if 'I' in has else 'I'}{i} is missing")
    return faults


def _order_faults(rows: Rows) -> list[str]:
    faults = []
    homes: defaultdict[int, set[int]] = defaultdict(set)
    for rank, row in enumerate(rows):
        place: dict[Triple, int] = {action: index for index, action in reversed(list(enumerate(row)))}
        for (stage, kind, i), index in place.items():
            homes[stage].add(rank)
            earlier = (stage, EARLIER.get(kind, ""), i)
            if place.get(earlier, -1) > index:
                faults.append(f"{Action(stage, kind, i)} comes before {Action(*earlier)} on rank {rank}")
    for stage, ranks in sorted(homes.items()):
        if len(ranks) > 1:
            faults.append(f"stage {stage} is on ranks {' and '.join(map(str, sorted(ranks)))}")
    return faults
