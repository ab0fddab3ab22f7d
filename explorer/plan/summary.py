"""A step in about twelve lines: its peak and what holds it, whether it fits, the cheapest changes, the next command.

`explain_one` in peak.py says why a peak is where it is, in sentences. Each line here has a label and figures, for the
first look in a terminal. `Summary` has the same figures for a program.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from dataclasses import replace as evolve
from typing import Literal

from msgspec.structs import replace

from explorer.errors import BadInput, ExplorerError
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.catalogue import default_size, sizes_of
from explorer.plan.memory.ledger import PLURAL, in_place, largest_roles, ledger
from explorer.plan.memory.next_step import next_step
from explorer.plan.names import listed, some
from explorer.plan.planners.planner import Planner
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.sizes import mib, mib_up, signed
from explorer.plan.why.caveats import bytes_outside, peak_caveats, why_not_predicted
from explorer.plan.why.peak import toggled_block
from explorer.record.allocations import Ledger
from explorer.record.base import to_plain
from explorer.record.card import Card, CardMemory
from explorer.record.graph import ModelGraph
from explorer.record.history import MemoryHistory
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast, Plan
from explorer.record.policy import Policy
from explorer.record.run import RunSpec

SHARES = (0.85, 0.7, 0.5)
"""Budgets of the changes, as shares of the peak. The planner finds the cheapest policy under each."""
NOT_JUDGED = "not judged"
LOWERED_BY = {
    "cuBLAS workspace": "CUBLAS_WORKSPACE_CONFIG=:16:8 leaves 128 KiB a thread, and products may be slower",
    "optimizer state": "an optimizer with less state, or FSDP2, lowers it",
    "parameter": "FSDP2 or a smaller type lowers them",
    "gradient": "FSDP2 or a smaller type lowers them",
    "input": "a smaller batch lowers them",
}
"""What lowers the roles that no policy does."""
LESS = 0.75
"""Share of the peak to fit in, where recompute lowers nothing and no other budget is known."""
STATES = 4
FULL = 0.5
"""Share of the machine's memory above which a model's step is predicted and not run."""
_MOST_HOLDERS = 4
_SMALL_SHARE = 0.02

Line = tuple[str, str]
"""Label and text."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the step, with predicted figures."""

    what: str
    policy: Policy
    peak_bytes: int
    change_share: float
    """Of the peak; below zero: the peak drops."""
    cost_ratio: float | None
    """Cost of the step over its cost without the change; None: unknown."""
    cost_unit: Literal["ms", "FLOPs"]
    gradients: str = NOT_JUDGED


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures behind the lines. Bytes of a first step are those of the step that follows it."""

    model: str
    n_parameters: int | None
    step: str
    batch: str
    origin: str
    device: str
    peak_bytes: int | None
    peak_is_lower_bound: bool
    moment: str
    held: dict[str, int]
    """Bytes at the peak by role, the largest first."""
    largest_blocks: dict[str, int]
    """Saved activations at the peak by block, the largest first."""
    total_memory_bytes: int | None
    reserved_bytes: int | None
    """What the caching allocator took from the GPU at most; None: not measured, or no GPU."""
    card: CardMemory | None
    card_refused: str
    """Why the card could not be filled; empty: it was, or none was asked for."""
    changes: tuple[Change, ...]
    no_change: str
    """Why no change is offered, or what else would help; may be empty."""
    caveats: tuple[str, ...]
    failure: str
    next: str


def summarize(run: Measurement, *, name: str, card: Card | None = None) -> Summary:
    """The summary of `run`. `name` is what a command line calls the run or its model."""
    step = next_step(run)
    on_card, refused = _on_card(run, card)
    by_role, by_block, moment = dict[str, int](), dict[str, int](), ""
    if step.allocations is not None:
        at = ledger(step)
        by_role, by_block, moment = dict(largest_roles(at)), _largest_blocks(at, run), in_place(at)
    changes, no_change = _changes(step) if run.complete else ((), "The step was cut short, so no change is predicted.")
    return Summary(
        model=run.spec.model.target if run.graph is None else _name_of(run.graph),
        n_parameters=None if run.graph is None else run.graph.n_parameters,
        step=run.recorded_in or f"one step of {run.spec.model.target} ({run.spec.optimizer})",
        batch=run.batch,
        origin=run.origin if step is run else "predicted for the step after it",
        device=f"{run.environment.device_name} ({run.environment.device})",
        peak_bytes=step.held_peak_bytes,
        peak_is_lower_bound=bool(bytes_outside(run)) or not run.complete,
        moment=moment,
        held=by_role,
        largest_blocks=by_block,
        total_memory_bytes=run.environment.total_memory_bytes,
        reserved_bytes=run.peaks.steady_reserved_peak_bytes or run.peaks.reserved_peak_bytes,
        card=on_card,
        card_refused=refused,
        changes=changes,
        no_change=_fixed(by_role) or no_change,
        caveats=tuple(peak_caveats(run)),
        failure="" if run.failure is None else run.failure.sentence,
        next=_next_command(run, name, changes),
    )


def judged(summary: Summary, verdicts: Sequence[str]) -> Summary:
    """`summary` with what comparisons found of the gradients of each change; empty: none is known."""
    changes = zip(summary.changes, verdicts)
    return evolve(summary, changes=tuple(evolve(each, gradients=text or NOT_JUDGED) for each, text in changes))


def _name_of(graph: ModelGraph) -> str:
    """The class of the model; of several models that one step trains, the class and the name of each."""
    if graph.by_fqn[""].kind != "SeveralModels":
        return graph.by_fqn[""].kind
    return listed([f"{block.kind} {block.fqn}" for block in graph.blocks if block.fqn and "." not in block.fqn])


def _on_card(run: Measurement, card: Card | None) -> tuple[CardMemory | None, str]:
    """The step on `card`, or the reason why it could not be played there."""
    if run.card is not None or card is None:
        return run.card, ""
    following = next_step(run)
    try:
        return memory_on(card, following, None if following is run else run), ""
    except ExplorerError as error:
        return None, str(error)


def _largest_blocks(at: Ledger, run: Measurement) -> dict[str, int]:
    saved = Counter[str]()
    for cell in at.cells:
        if cell.role == "saved activation":
            saved[toggled_block(cell.block, run.graph)] += cell.n_bytes
    return dict(saved.most_common())


def _fixed(by_role: dict[str, int]) -> str:
    """A sentence on the bytes that no policy lowers, if they are most of the peak; else empty."""
    fixed = {role: n_bytes for role, n_bytes in by_role.items() if role in LOWERED_BY}
    if 2 * sum(fixed.values()) <= sum(by_role.values()):
        return ""
    largest = max(fixed, key=fixed.__getitem__)
    most = f"the largest part {PLURAL.get(largest)} ({mib(fixed[largest])})"  # type: ignore[call-overload]
    return f"Recompute cannot lower {mib(sum(fixed.values()))} of the peak, {most}: {LOWERED_BY[largest]}."


def _changes(step: Measurement) -> tuple[tuple[Change, ...], str]:
    """The cheapest policies under SHARES of the peak, or the reason why there is none."""
    if step.graph is None:
        return (), "The run has no graph of its model, so no change is predicted."
    by_peak: dict[int, Change] = {}
    reason = ""
    try:
        planner = Planner(step, step.graph)
        for share in SHARES:
            plan = planner.within(int(planner.keep_all_bytes * share))
            by_peak.setdefault(plan.step_peak_bytes, _change(plan))
    except ExplorerError as error:  # no policy is below this share, so none is below the next
        reason = f"{error.sentence.partition('. ')[0].rstrip('.')}."
        _, _, least = reason.partition(": the least ")
        if least and not by_peak:
            reason = f"Recompute frees less than {100 * (1 - max(SHARES)):.0f} % of this peak: the least {least}"
    return tuple(by_peak.values()), "" if by_peak else reason


def _change(plan: Plan) -> Change:
    ratio = 1 + plan.extra_cost / plan.step_cost if plan.step_cost else None
    return Change(
        what=f"recompute {some(plan.policy.blocks)}",
        policy=plan.policy,
        peak_bytes=plan.step_peak_bytes,
        change_share=plan.step_peak_bytes / max(plan.baseline_step_peak_bytes, 1) - 1,
        cost_ratio=ratio,
        cost_unit=plan.cost_unit,
    )


def _next_command(run: Measurement, name: str, changes: tuple[Change, ...]) -> str:
    """The command that writes the policy of the largest change. Without one, the command that tries levers on a model.

    A recorded step cannot be changed and played: its page is named.
    """
    spec, peak = run.spec, run.step_peak_bytes
    is_model = name == spec.model.target
    source = shlex.join([name, *_options(spec)]) if is_model else shlex.quote(name)
    if is_model and not changes and peak is not None:
        budget = mib(int(LESS * peak)).replace(" ", "").replace(",", "")
        return f"checkpoint-explorer fit {source} --budget {budget}"
    if not changes:
        return f"checkpoint-explorer {source} --html report.html"
    budget = mib_up(changes[-1].peak_bytes).replace(" ", "").replace(",", "")
    return f"checkpoint-explorer plan {source} --budget {budget} --out policy.yaml"


def _options(spec: RunSpec) -> list[str]:
    """Options of the command line that ask for the model and the conditions of `spec`."""
    model, usual = spec.model, RunSpec(model=spec.model)
    options = [f"--set={name}={value}" for name, value in model.arguments.items()]
    if model.size != default_size(sizes_of(model.target)):
        options.append(f"--size={model.size}")
    if model.weights:
        options.append(f"--weights={model.weights}")
    for field in ("seed", "device", "autocast", "mode", "dtype", "optimizer", "optimizer_form"):
        if getattr(spec, field) != getattr(usual, field):
            options.append(f"--{field.replace('_', '-')}={getattr(spec, field)}")
    if spec.n_accumulation != 1:
        options.append(f"--accumulate={spec.n_accumulation}")
    return [*options, *(f"--frozen={block}" for block in spec.frozen)]


def summary_document(summary: Summary) -> dict[str, object]:
    """The fields for a program. Of a card the figures, and not its lines over the step."""
    card = summary.card
    document = {field.name: getattr(summary, field.name) for field in fields(summary)}
    if card is not None:
        document["card"] = {"name": card.card.name, **card.headlines(), "refused": card.refused}
    return document


def summary_lines(summary: Summary) -> Iterator[Line]:
    """The lines of a terminal, a label and a text each."""
    model, step = summary.model, summary.step
    if summary.n_parameters is not None:
        model += f", {summary.n_parameters:,} parameters"
    if summary.batch:
        step += f", batch {summary.batch}"
    yield "Step", f"{model}: {step}, on {summary.device}"
    if summary.failure:
        yield "Refused", summary.failure
    if summary.peak_bytes is not None:
        bound = "at least " if summary.peak_is_lower_bound else ""
        yield "Peak", f"{bound}{mib(summary.peak_bytes)} {summary.origin}, {summary.moment}"
    if holders := held_text(summary):
        yield "Held by", holders
    yield "Fits", fits_text(summary)
    for number, change in enumerate(summary.changes):
        yield "Helps" if number == 0 else "", change_text(change)
    if summary.no_change:
        yield "" if summary.changes else "Helps", summary.no_change
    for caveat in summary.caveats[:2]:
        yield "Note", caveat
    yield "Next", summary.next


def held_text(summary: Summary) -> str:
    """`36.1 MiB saved activations (h.0 9.0 MiB, ...), 6.1 MiB optimizer state`."""
    parts = []
    for role, n_bytes in list(summary.held.items())[:_MOST_HOLDERS]:
        if n_bytes < _SMALL_SHARE * (summary.peak_bytes or 0):
            continue
        part = f"{mib(n_bytes)} {PLURAL.get(role, role)}"  # type: ignore[call-overload]
        if role == "saved activation":
            blocks = list(summary.largest_blocks.items())[:3]
            named = [f"{block or 'the model itself'} {mib(size)}" for block, size in blocks]
            part += f" (most in {', '.join(named)})"
        parts.append(part)
    return ", ".join(parts)


def fits_text(summary: Summary) -> str:
    """Whether the step fits its own device, and the card that was asked for."""
    card, peak = summary.card, summary.peak_bytes
    if card is not None and card.refused is not None:
        request = card.refused
        block = f" of {request.block}" if request.block else ""
        where = f"in {request.phase}{block}, step {request.step}"
        if request.tick == 0:
            where = "before the first step"
        return (
            f"{card.card.name}: no. It refuses {mib(request.n_bytes)} {where}, with "
            f"{mib(request.reserved_bytes)} reserved (simulated)"
        )
    if card is not None:
        return f"{card.card.name}: yes, {mib(card.reserved_bytes)} reserved of {mib(card.card.total_bytes)} (simulated)"
    if summary.card_refused:
        return f"not known: {summary.card_refused}"
    total = summary.total_memory_bytes
    if total is None or peak is None:
        return "not known for this machine; --card NAME says it for a GPU"
    reserved = summary.reserved_bytes
    size = mib(peak) if reserved is None else f"{mib(reserved)} reserved"
    word = "no" if summary.failure or max(peak, reserved or 0) > total else "yes"
    gpu, is_gpu, _ = summary.device.rpartition(" (cuda)")
    if is_gpu:
        return f"{gpu}: {word}, {size} of {mib(total)}; --card NAME says it for another GPU"
    return f"this machine: {word}, {size} of {mib(total)}; --card NAME says it for a GPU"


def change_text(change: Change) -> str:
    """`recompute h.0   10.6 MiB  -18 %  FLOPs +8 %  gradients not judged`."""
    price = "price unknown"
    if change.cost_ratio is not None and change.cost_unit == "ms":
        price = f"time ×{change.cost_ratio:.2f} (predicted)"
    elif change.cost_ratio is not None:
        price = f"FLOPs {signed(change.cost_ratio - 1)}"
    peak = f"{mib(change.peak_bytes)} ({signed(change.change_share)})"
    return f"{change.what}: {peak}, {price}, gradients {change.gradients}"


def forecast_step(step: Measurement, policy: Policy) -> Measurement:
    """The timeline of a recorded step under `policy`, predicted; figures by block are unknown.

    Raises BadInput if the policy has no forecast.
    """
    predicted = Forecaster(step, step.graph).step(policy)
    if predicted is None:
        why = why_not_predicted(policy, step.graph, Forecast())
        raise BadInput(f"The policy has no forecast on this step. {why}".strip(), hint="Run it in your own loop.")
    return replace(predicted, graph=step.graph, blocks=())


def forecast_document(step: Measurement, policy: Policy) -> dict[str, object]:
    """The forecast of `policy` on a recorded step, for a program."""
    forecast = Forecaster(step, step.graph).forecast(policy)
    return {"policy": policy, "forecast": forecast, "gradients": NOT_JUDGED}


def forecast_lines(step: Measurement, policy: Policy) -> Iterator[Line]:
    """A recorded step beside its forecast under `policy`. Nothing runs, so no gradient is judged."""
    forecast = Forecaster(step, step.graph).forecast(policy)
    yield "Policy", f"recompute {some(policy.blocks)}" if policy.blocks else "everything kept"
    yield "Peak", _from_to(step.step_peak_bytes, forecast.step_peak_bytes)
    yield "Saved", _from_to(step.saved_after_forward_bytes, forecast.saved_after_forward_bytes)
    yield "FLOPs", "not predicted" if forecast.flop_ratio is None else signed(forecast.flop_ratio - 1)
    yield "Gradients", f"{NOT_JUDGED}: a recorded step is not run again; explorer.judge compares two steps of your loop"
    if why := why_not_predicted(policy, step.graph, forecast):
        yield "Note", why


def _from_to(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return "not predicted"
    return f"{mib(before)} recorded, {mib(after)} predicted ({signed(after / max(before, 1) - 1)})"


def history_document(history: MemoryHistory) -> dict[str, object]:
    """The figures of each device with its stranded bytes, and what is alive at its peak. Columns are left out."""
    devices = []
    for device, run in zip(history.devices, history.runs):
        simulated = [{**to_plain(row), "stranded_bytes": row.stranded_bytes} for row in device.simulated]
        at = ledger(run)
        peak = {"peak_bytes": at.total_bytes, "peak_phase": run.peak_phase, "at_peak_by_module": at.by_block}
        plain = {**to_plain(device), "simulated": simulated, "stranded_bytes": device.stranded_bytes, **peak}
        devices.append(plain)
    return {"devices": devices}


def is_too_large(graph: ModelGraph) -> bool:
    """Whether a step of AdamW would take most of this machine's memory: weights, gradients and two moments."""
    if not hasattr(os, "sysconf"):
        return False
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return STATES * graph.by_fqn[""].parameter_bytes > FULL * total_bytes
