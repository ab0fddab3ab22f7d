"""The three rules of an action list, each broken one named by its action.

(1) Every stage does every microbatch exactly once each way: F once; B once, or I and W once each.
(2) A stage lives on one rank, and there F comes before B or I, and I before W.
(3) Somebody can always go on: no rank waits for ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from explorer.errors import InvalidPlan
from explorer.plan.schedule_text import Action, Rows

N_SHOWN = 5


def check_rows(rows: Rows, *, n_stages: int, n_microbatches: int) -> None:
    """Raises InvalidPlan that names the actions at fault; returns nothing when the rules hold."""
    faults = [*_count_faults(rows, n_stages, n_microbatches), *_order_faults(rows)]
    if faults:
        more = f" and {len(faults) - N_SHOWN} more" if len(faults) > N_SHOWN else ""
        raise InvalidPlan(
            f"The schedule breaks its rules: {'; '.join(faults[:N_SHOWN])}{more}.",
            hint="Each stage does each microbatch exactly once each way, F before B (or I before W), on one rank.",
        )
    play(rows)


def needs(action: Action, n_stages: int) -> list[tuple[Action, ...]]:
    """What must be done before `action`; of each tuple any one suffices."""
    stage, kind, microbatch = action
    if kind == "F":
        return [(Action(stage - 1, "F", microbatch),)] if stage else []
    if kind == "W":
        return [(Action(stage, "I", microbatch),)]
    own: list[tuple[Action, ...]] = [(Action(stage, "F", microbatch),)]
    if stage < n_stages - 1:
        own.append((Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)))
    return own


def play(rows: Rows) -> list[Action]:
    """All actions in one order that respects every need: what one process can run. Raises InvalidPlan on a deadlock.

    Time is counted in steps in which every rank does at most one action, so the order follows the ranks' own pace.
    """
    n_stages = 1 + max((action.stage for row in rows for action in row), default=-1)
    done: set[Action] = set()
    order: list[Action] = []
    at = [0] * len(rows)
    while any(at[rank] < len(row) for rank, row in enumerate(rows)):
        ready = [
            rank for rank, row in enumerate(rows) if at[rank] < len(row) and not _missing(row[at[rank]], done, n_stages)
        ]
        if not ready:
            raise InvalidPlan(
                f"The schedule deadlocks: {_waiting(rows, at, done, n_stages)}.", hint="Reorder these rows."
            )
        step = [rows[rank][at[rank]] for rank in ready]
        for rank in ready:
            at[rank] += 1
        order += step
        done.update(step)
    return order


def _missing(action: Action, done: set[Action], n_stages: int) -> list[str]:
    return [str(either[0]) for either in needs(action, n_stages) if done.isdisjoint(either)]


def _waiting(rows: Rows, at: list[int], done: set[Action], n_stages: int) -> str:
    stuck = [(rank, rows[rank][at[rank]]) for rank in range(len(rows)) if at[rank] < len(rows[rank])]
    return "; ".join(f"rank {rank} waits at {a} for {' and '.join(_missing(a, done, n_stages))}" for rank, a in stuck)


def _count_faults(rows: Rows, n_stages: int, n_microbatches: int) -> list[str]:
    counts = Counter(action for row in rows for action in row)
    faults = [f"{action} appears {n} times" for action, n in counts.items() if n > 1]
    for action in counts:
        if action.stage >= n_stages:
            faults.append(f"{action} names stage {action.stage} of {n_stages}")
        if action.microbatch >= n_microbatches:
            faults.append(f"{action} names microbatch {action.microbatch} of {n_microbatches}")
    for stage in range(n_stages):
        for i in range(n_microbatches):
            has = {kind for kind in "FBIW" if Action(stage, kind, i) in counts}
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
        place = {action: index for index, action in reversed(list(enumerate(row)))}
        for action, index in place.items():
            homes[action.stage].add(rank)
            earlier = action._replace(kind={"B": "F", "I": "F", "W": "I"}.get(action.kind, "F"))
            if action.kind != "F" and place.get(earlier, -1) > index:
                faults.append(f"{action} comes before {earlier} on rank {rank}")
    for stage, ranks in sorted(homes.items()):
        if len(ranks) > 1:
            faults.append(f"stage {stage} is on ranks {' and '.join(map(str, sorted(ranks)))}")
    return faults
