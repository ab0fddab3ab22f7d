"""A plan and its proof in words that need no knowledge of solvers, and a policy in a few words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from explorer.plan.card.cards import capacity_bytes
from explorer.plan.names import listed, operator_word, some
from explorer.plan.policy.presets import preset_titles
from explorer.record.card import CardMemory
from explorer.record.files import Export
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import PCIE_4, Forecast, Plan, Wish
from explorer.record.policy import Action, Policy, Unit
from explorer.view.drawing.units import change, count, mib, percent

EXAMPLES, EXAMPLES_ON_CARD = "60 MiB, 50 %, +10 % time", "card, 60 MiB, 50 %"
SLIDER = "Less memory, more time"
SLIDER_FOLLOWS = "A slider over the cheapest plans follows here."
START = "Type a budget, or drag the slider: the graph follows with the cheapest policy."
EMPTY = "The cheapest plans follow once a baseline is measured and nothing else is under way."
NO_RECORDED_PLAN = "No plan of the recorded run keeps this; ask again once this machine has measured the model."
BEST = "The cheapest policy found for this peak."
KEEP_ALL = "Keeping everything meets this; nothing has to be recomputed."
AS_GOOD = "No plan found is faster at this peak."

PROVEN_TO = 5e-3
"""A gap smaller than the resolution of any clock here."""
ABOUT = (
    "The planner writes the step as a small program. Each module or segment is kept or recomputed, no moment may hold "
    "more than the budget, and the time is minimal. A solver finds the best choice, and a bound that no choice can "
    "beat. The proof is about the forecast: only a run says how much is held and how long the step takes. Segments "
    "(several blocks recomputed as one) and blocks that keep the results of their matrix products are choices where "
    "the certificate counts them."
)


def outside_blocks(graph: ModelGraph) -> str:
    """The saved bytes that no block holds and how to reach them; empty if blocks hold most."""
    saved = graph.by_fqn[""].saved_bytes
    if 2 * graph.outside_bytes <= saved:
        return ""
    if not graph.children[""]:
        return f"{graph.model.target} is one module with no modules inside: no part of it can be recomputed."
    return (
        f"{mib(graph.outside_bytes)} of the saved {mib(saved)} are made by the model's own operations between blocks: "
        "only operations inside of modules can be recomputed."
    )


OTHER_CHANGES = "The tab Budget has other changes that may."


def nothing_saves(graph: ModelGraph | None) -> str:
    where = outside_blocks(graph) if graph else ""
    return f"No policy found needs less memory than keeping everything. {where} {OTHER_CHANGES}".replace("  ", " ")


def certificate(plan: Plan) -> tuple[str, str]:
    """(the proof in words, the meaning of the words)"""
    proof = plan.certificate
    among = proof.scope
    least = plan.budget_bytes is None
    better = "needs less memory" if least else "is faster"
    if proof.gap <= PROVEN_TO:
        proven = f"Proven: no other choice among {among}, {better}."
    elif proof.gap >= 1:
        proven = f"The best that was found in time among {among}; nothing is proven."
    else:
        proven = f"Nearly proven: no other choice among {among}, {better} by more than {percent(proof.gap)}."
    if plan.budget_bytes is not None:
        proven += f" Bounded: {plan.bounded} bytes."
    looked = f"{count(proof.n_rows, 'moment')} of the step decided it, {count(proof.n_solves, 'call')} of the solver."
    return proven, f"{ABOUT} {looked}"


FRONT = (
    "Click a point to draw its policy. Hollow marks are predicted from one recorded step; filled marks were measured."
)
FRONT_OF_FLOPS = (
    "Click a point to draw its policy. FLOPs leave out element-wise work: a preset that keeps products looks free, and "
    "plans make no such choice."
)
MEASURING = "Measuring the points that matter: {} to go."
SEARCHING = "Looking for the cheapest policy within {} ..."
REACHED_LATER = " The front has since reached {}: drag the slider to its left end."
"""Behind a refusal: the front has since reached a lower peak than the least of the refusal."""
MEASURE = (
    "Runs everything kept and each of these policies in turns: the one that is drawn, the least peak, the sharpest "
    "bend of the front, and half the way down. Cancel stops the one under way and leaves out the rest."
)


def search_progress(n: int, n_expected: int) -> str:
    """Text while the worker searches the front."""
    return f"Finding plans: {n} of {n_expected}." if n_expected else "Finding plans."


def against_budget(peak_bytes: int, budget_bytes: int, *, measured: bool) -> str:
    """Markdown."""
    return _verdict(mib(peak_bytes), bytes_verdict(peak_bytes, budget_bytes), measured=measured)


def bytes_verdict(peak_bytes: int, budget_bytes: int) -> str:
    """`within 60.0 MiB` or `2.5 MiB over 60.0 MiB`."""
    over = peak_bytes - budget_bytes
    return f"{mib(over)} over {mib(budget_bytes)}" if over > 0 else f"within {mib(budget_bytes)}"


def against_time(ratio: float, more_time: float, counts: str, *, measured: bool) -> str:
    """Markdown; `counts`: time, or FLOPs if the step is not timed."""
    return _verdict(f"{percent(ratio - 1, signed=True)} {counts}", time_verdict(ratio, more_time), measured=measured)


def _verdict(figure: str, verdict: str, *, measured: bool) -> str:
    colour = "green" if verdict.startswith("within") else "red"
    return f":{colour}[{figure} {'measured' if measured else 'predicted'}: {verdict}.]"


def time_verdict(ratio: float, more_time: float) -> str:
    """`within +10 %` or `1.2 % over +10 %`. Tenths of a percent count: no clock here tells smaller ones apart."""
    limit = f"+{100 * more_time:.4g} %"
    over = round(100 * (ratio - 1) - 100 * more_time, 1)
    return f"{over:.1f} % over {limit}" if over > 0 else f"within {limit}"


def understood(wish: Wish) -> str:
    """How a budget was read that leaves room for doubt; else the empty string."""
    return f"Read as {wish.understood}." if wish.understood else ""


def against_card(memory: CardMemory) -> str:
    """Markdown."""
    room = mib(capacity_bytes(memory.card))
    if memory.refused is None:
        return f":green[{mib(memory.reserved_bytes)} reserved, predicted: within {room}.]"
    return f":red[A request of {mib(memory.refused.n_bytes)} is refused, predicted: {room} can be reserved.]"


def better(peak: str, cost: float, drawn: float, counts: str) -> str:
    """The sentence on a policy that a plan beats; `counts`: time, or FLOPs if the step is not timed."""
    return f"A plan with {peak} takes ×{cost:.2f} {counts} instead of ×{drawn:.2f}, predicted."


_DONE: dict[Action, str] = {"recompute": "recompute", "save_ops": "recompute", "offload": "offload"}


def in_words(policy: Policy) -> str:
    """`recompute 12 blocks: blocks.0 ... blocks.11`, grouped by action."""
    alike: dict[tuple[str, tuple[str, ...]], list[Unit]] = defaultdict(list)
    for unit in policy.units:
        alike[unit.action, unit.save_ops].append(unit)
    return "; ".join(_units(units) for units in alike.values()) or "keep all"


def _units(units: Sequence[Unit]) -> str:
    """Words for the units of one action. Names are sorted, as a reader takes `a ... z` for consecutive blocks."""
    named = sorted((fqn for unit in units for fqn in unit.blocks), key=_counted)
    names = [fqn or "the model" for fqn in named]
    listed = ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]}"
    first = units[0]
    words = f"{_DONE[first.action]} {count(len(named), 'block')}"
    if any(len(unit.blocks) > 1 for unit in units):
        words += f" in {count(len(units), 'unit')}"
    if first.save_ops:
        words += f" but keep {some(tuple(dict.fromkeys(map(operator_word, first.save_ops))))}"
    return f"{words}: {listed}"


def _counted(fqn: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts `blocks.9` before `blocks.10`."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in fqn.split(".")]


def host_sentences(plan: Plan, run: Measurement) -> Iterator[str]:
    """What a plan with offloaded blocks holds on the host, and the interval of the time of its copies."""
    if plan.moved_bytes is None:
        if plan.host_bandwidth:
            yield "nothing is offloaded: recompute is cheaper than the copies may be"
        return
    rate = f"{plan.host_bandwidth / 1e9:g} GB/s"
    source = " (the published rate of PCIe 4.0 x16)" * (plan.host_bandwidth == PCIE_4)
    yield f"{mib(plan.host_peak_bytes or 0)} predicted, {mib(plan.moved_bytes)} cross in a step"
    yield f"copies take 0 (all beside the step) to {plan.copies_ms:.3g} ms (none) at {rate}{source}"
    yield "the plan counts the time of all copies"
    if run.peaks.offloaded_peak_bytes is not None and run.environment.device == "cpu":
        host_bytes = mib(run.peaks.offloaded_peak_bytes)
        yield f"{host_bytes} in the run; a CPU stood in for the device, and the time of its copies is not a GPU's"
    if plan.cost_unit == "FLOPs":
        yield "the step was not timed, so blocks are offloaded only where recompute does not reach the budget"
    elif plan.recompute_in_interval:
        yield (
            f"recompute of {some(plan.recompute_in_interval)} takes a time in that interval: it is offloaded for its "
            "bytes, and the copies may take longer"
        )


def export_sentences(form: Export, most_named: int = 40) -> list[str]:
    """The blocks that the other program recomputes, what is lost on the way there, and notes."""
    sentences = [*form.reasons, *form.notes]
    if form.recomputed is None:
        return sentences
    names = listed([fqn or "the model" for fqn in form.recomputed], most_named)
    return [f"It recomputes {names or 'nothing'}.", *sentences]


def expected(forecast: Forecast, baseline_peak_bytes: int | None) -> str:
    """`≈ −40 % peak, ×1.16 time`: predicted effect of a policy on the baseline; empty without a prediction."""
    moved = change(baseline_peak_bytes, forecast.step_peak_bytes)
    effects = []
    if moved is not None:
        effects.append(f"{percent(moved, signed=True)} peak")
    if forecast.time_ratio is not None:
        effects.append(f"×{forecast.time_ratio:.2f} time")
    return f"≈ {', '.join(effects)}" if effects else ""


SAME_PEAK = 0.005
"""Share of the baseline's peak below which two peaks count as equal."""


def is_beaten(forecast: Forecast, other: Forecast, baseline_peak_bytes: int | None) -> bool:
    """Whether `other` is no worse in peak and time, and better in one by more than equal peaks or times may differ."""
    peak, time, baseline = forecast.step_peak_bytes, forecast.time_ratio, baseline_peak_bytes
    if peak is None or time is None or other.step_peak_bytes is None or other.time_ratio is None or not baseline:
        return False
    lower = (peak - other.step_peak_bytes) / baseline
    faster = time - other.time_ratio
    no_worse = lower >= -SAME_PEAK and faster >= 0
    return no_worse and (lower > SAME_PEAK or faster > (forecast.time_ratio_spread or 0))


def effects_of_presets(forecasts: Mapping[str, Forecast], baseline_peak_bytes: int | None) -> dict[str, str]:
    """The effect of each preset in words, with the name of a preset that is better in both where there is one."""
    words = {name: expected(forecast, baseline_peak_bytes) for name, forecast in forecasts.items()}
    for name, forecast in forecasts.items():
        better = [other for other in forecasts if is_beaten(forecast, forecasts[other], baseline_peak_bytes)]
        if better:
            best = min(better, key=lambda other: forecasts[other].time_ratio or 0)
            words[name] += f"; {preset_titles()[best]} is better"
    return words
