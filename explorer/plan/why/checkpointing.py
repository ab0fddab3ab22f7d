"""Is the model's own checkpointing alive, and on everything? One table of a recorded step answers, block by block.

caveats.py names the blocks that ran again. The table here also has blocks whose checkpoint was called and is dead, and
blocks whose switch is on and does nothing. Blocks that are kept though blocks like them ran again have a row too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from explorer.plan.memory.reruns import self_checkpointing
from explorer.plan.names import above, in_columns, is_within, lineage, listed, outermost, overlaps, some
from explorer.record.checkpointing import CheckpointRegion, OwnCheckpointing
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement

Row = dict[str, str | int]
DEAD = (
    "no input requires a gradient, so nothing inside trains: pass use_reentrant=False, or let the input require one "
    "(enable_input_require_grads())"
)
EVAL = "in eval mode, where most checkpoint code does not act: call train() on it"


@dataclass
class _Unit:
    """Figures of a block that the model checkpoints, or may."""

    n_calls: int = 0
    n_again: float = 0
    n_dead: int = 0
    reentrant: bool = False
    alike: str = ""
    """`3 of 8`: how many of the blocks like this one are checkpointed, if this one is not."""


def checkpointing_rows(run: Measurement) -> list[Row]:
    """A row for each block that the model checkpoints by itself, or that looks as if it should. Equal neighbours share
    a row. Empty if the model has neither a switch nor a checkpoint, and for a compiled step."""
    checkpoints = run.own_checkpointing
    if checkpoints is None or run.ran_compiled:
        return []
    units = _units(run, checkpoints)
    rows = [(fqn, _row(fqn, unit, checkpoints)) for fqn, unit in units.items()]
    if not rows and checkpoints.switches:
        fqns = outermost(switch.block for switch in checkpoints.switches)
        rows = [(fqn, _row(fqn, _Unit(), checkpoints)) for fqn in fqns]
    grouped: list[Row] = []
    for (_, row), same in groupby(rows, key=lambda pair: (pair[0].rpartition(".")[0], pair[1])):
        fqns = [fqn or "the model" for fqn, _ in same]
        name = fqns[0] if len(fqns) == 1 else f"{fqns[0]} to {fqns[-1].rpartition('.')[2]}, each of {len(fqns)}"
        grouped.append({"block": name, **row})
    return grouped


def sides(comparison: Comparison, baseline: str = "baseline") -> Iterator[str]:
    """What is wrong with the baseline itself, whatever the candidate: no verdict on two sides shows it.

    `baseline` is the word for it.
    """
    if names := comparison.untrained:
        yield (
            f"{len(names):,} of {len(comparison.gradients):,} trainable parameters get no gradient in the {baseline}: "
            f"{listed(names)}."
        )
        for row in checkpointing_rows(comparison.baseline):
            if str(row["that is"]).startswith("dead"):
                yield f"The model's own checkpoint of {row['block']}, is {row['that is']}."
    if (plain := comparison.without_checkpoint) is None:
        return
    left, right = (dict.fromkeys(names) for names in (plain.baseline, plain.candidate))
    both = [name for name in left if name in right]
    without = "from the same step without any checkpoint"
    if alone := [name for name in left if name not in right]:
        yield (
            f"The {baseline} differs {without} in {listed(alone)}: the model's own checkpointing does it, and the "
            "candidate does not."
        )
    if both:
        yield f"Both sides differ {without} in {listed(both)}: the model's own checkpointing does it under any policy."
    if alone := [name for name in right if name not in left]:
        yield f"The candidate differs {without} in {listed(alone)}; the {baseline} does not."


def not_comparable_because(comparison: Comparison) -> str:
    """The reason in a sentence; empty if neither the baseline nor its own checkpoint is to blame."""
    plain = comparison.without_checkpoint
    if plain is None or not plain.lost or comparison.not_reproducible_because:
        return comparison.not_reproducible_because
    return (
        f"The model's own checkpoint loses the gradients of {len(plain.lost):,} of {len(comparison.gradients):,} "
        "trainable parameters, so the baseline is no training to compare with. Mend that first."
    )


def moved_in(comparison: Comparison) -> str:
    """The side whose state is not that of the step without any checkpoint; empty if unknown or the candidate."""
    plain = comparison.without_checkpoint
    if plain is None:
        return ""
    wrong = {diff.name for diff in comparison.of_state if diff.verdict == "different"}
    of_baseline, of_candidate = (not wrong.isdisjoint(names) for names in (plain.baseline, plain.candidate))
    if not of_baseline:
        return ""
    return "both sides" if of_candidate else "the baseline alone"


def untrained(run: Measurement) -> str:
    """`16 of 18 trainable parameters got no gradient in this step: a, b, c and 13 more.`; empty: all got one."""
    checkpoints = run.own_checkpointing
    if checkpoints is None or not checkpoints.without_gradient:
        return ""
    n, names = len(checkpoints.without_gradient), listed(checkpoints.without_gradient)
    return f"{n:,} of {checkpoints.n_trainable:,} trainable parameters got no gradient in this step: {names}."


def checkpointing_lines(run: Measurement) -> list[str]:
    """Table and sentence as lines of text; empty if there is nothing to say."""
    table = [f"  {line}" for line in in_columns(checkpointing_rows(run))]
    lines = ["Checkpointing by the model itself:", *table] if table else []
    return [*lines, *filter(None, [untrained(run), stacked(run)])]


def stacked(run: Measurement) -> str:
    """A sentence on blocks with more than one checkpoint around a call: FSDP's, a switch, a policy; or empty."""
    checkpoints = run.own_checkpointing
    if checkpoints is None:
        return ""
    calls: dict[str, int] = {}
    called = [cost.fqn for cost in run.blocks if cost.n_forward]
    for region in checkpoints.regions:
        for fqn in _covered(region, called):
            block = fqn.replace("._checkpoint_wrapped_module", "")  # of FSDP's wrapper, around the same block
            calls[block] = calls.get(block, 0) + region.n_calls
    units = run.spec.policy.blocks

    def is_stacked(fqn: str, n_calls: int) -> bool:
        is_in_unit = overlaps(fqn, *units)
        return is_in_unit or (fqn in run.by_fqn and n_calls > max(1, run.by_fqn[fqn].n_forward))

    again = tuple(fqn for fqn, n_calls in calls.items() if is_stacked(fqn, n_calls))
    if not again:
        return ""
    return (
        f"{some(again)}: several checkpoints around one call (the policy's, FSDP's, a switch's, the model's own). "
        "Each adds a forward: leave one of them on."
    )


def _units(run: Measurement, checkpoints: OwnCheckpointing) -> dict[str, _Unit]:
    """The blocks with a row, in the order of the model."""
    called = [cost.fqn for cost in run.blocks if cost.n_forward]
    units: dict[str, _Unit] = {}
    for region in checkpoints.regions:
        for fqn in _covered(region, called):
            unit = units.setdefault(fqn, _Unit())
            unit.n_calls += region.n_calls
            unit.n_again += region.n_again
            unit.n_dead += region.n_without_gradient
            unit.reentrant |= region.reentrant
    for fqn, times in self_checkpointing(run).items():
        if not overlaps(fqn, *units):
            units[fqn] = _Unit(n_again=times)
    checkpointed = list(units)
    for fqn in _idle_switches(checkpoints):
        if not overlaps(fqn, *checkpointed):
            units.setdefault(fqn, _Unit())
    for fqn, alike in _kept_though_alike(checkpointed, called, run.graph):
        units.setdefault(fqn, _Unit()).alike = alike
    order = {cost.fqn: i for i, cost in enumerate(run.blocks)}
    return dict(sorted(units.items(), key=lambda item: order.get(item[0], 0)))


def _covered(region: CheckpointRegion, called: Sequence[str]) -> tuple[str, ...]:
    """The blocks of a region: the caller if everything that the caller calls lies inside."""
    inside = [fqn for fqn in called if fqn != region.caller and is_within(fqn, region.caller)]
    is_whole = all(is_within(fqn, *region.blocks) for fqn in inside)
    return (region.caller,) if is_whole or not region.blocks else region.blocks


def _idle_switches(checkpoints: OwnCheckpointing) -> list[str]:
    """The innermost blocks with a switch that is on."""
    on = dict.fromkeys(switch.block for switch in checkpoints.switches if switch.is_on)
    holders = set(above(*on))
    return [fqn for fqn in on if fqn not in holders]


def _kept_though_alike(
    units: Sequence[str], called: Sequence[str], graph: ModelGraph | None
) -> Iterator[tuple[str, str]]:
    """Blocks of a list that are not checkpointed, beside blocks of the same kind that are."""

    def family(fqn: str) -> tuple[str, str]:
        block = graph.by_fqn.get(fqn) if graph else None
        return fqn.rpartition(".")[0], block.kind if block else ""

    lists = {family(fqn) for fqn in units if fqn.rpartition(".")[2].isdigit()}
    for parent in lists:
        members = [fqn for fqn in called if fqn.rpartition(".")[2].isdigit() and family(fqn) == parent]
        plain = [fqn for fqn in members if not overlaps(fqn, *units)]
        for fqn in plain:
            yield fqn, f"{len(members) - len(plain)} of {len(members)}"


def _row(fqn: str, unit: _Unit, checkpoints: OwnCheckpointing) -> Row:
    switch = next((switch for name in lineage(fqn) for switch in checkpoints.switches if switch.block == name), None)
    in_eval = is_within(fqn, *checkpoints.in_eval) or (switch is not None and not switch.trains)
    without = sum(is_within(name, fqn) for name in checkpoints.without_gradient)
    state = "none"
    if switch is not None:
        state = f"{switch.name} {'on' if switch.is_on else 'off'}"
    return {
        "switch": state,
        "called": unit.n_calls,
        "ran again": f"{unit.n_again:.3g}",
        "mode": "eval" if in_eval else "train",
        "without a gradient": without,
        "that is": _finding(unit, is_on=switch is not None and switch.is_on, in_eval=in_eval, without=without),
    }


def _finding(unit: _Unit, *, is_on: bool, in_eval: bool, without: int) -> str:
    """Whether the checkpoint of a block acts, and what to do if it does not."""
    if unit.n_dead and without:
        part = "dead" if unit.n_dead == unit.n_calls else f"dead in {unit.n_dead} of {unit.n_calls} calls"
        return f"{part}: {DEAD}"
    if unit.n_again and without:
        return "alive, but parameters inside get no gradient: look for a detach or no_grad between them and the loss"
    if unit.n_again:
        return "alive" if unit.n_calls else "alive, by code of the model's own"
    if unit.n_calls and without:
        return "dead: no gradient comes back to it: look for a detach or no_grad between it and the loss"
    if unit.n_calls:
        return "not needed: backward asks for nothing from there"
    if unit.alike:
        return f"kept, though {unit.alike} blocks like it are checkpointed" + (f"; it is {EVAL}" if in_eval else "")
    if not is_on:
        return "off: gradient_checkpointing_enable(), or set_grad_checkpointing() of timm, turns it on"
    if in_eval:
        return f"switched on and without effect: it is {EVAL}"
    return "switched on and never called: its forward does not reach the checkpoint"
