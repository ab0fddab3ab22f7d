"""Why a policy helped, or why it did not, and what the peak of one run is made of: sentences computed from the ledgers.

Each rule looks at one fact and returns one sentence with figures, or nothing. For two runs the first sentence is the
result. The second is where the peak went and what it is made of. The rest are the reasons why no more was gained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from explorer.plan.memory.ledger import PLURAL, alive, array_of, in_place, largest_roles, ledger, place
from explorer.plan.memory.next_step import new_bytes, next_step
from explorer.plan.memory.outside import SAVED, older_graphs, outside_modules, with_size
from explorer.plan.memory.reruns import in_words
from explorer.plan.names import is_within, lineage, listed, some
from explorer.plan.predict.calls import stash_bytes
from explorer.plan.predict.forecaster import Forecaster, prices, prices_of_keeping
from explorer.plan.sizes import from_to, mib, signed
from explorer.record.allocations import FIXED_ROLES, Ledger
from explorer.record.base import Record
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Price
from explorer.record.policy import Policy


class PeakCase(Record):
    """Both runs, their peaks, and the model. Of one run alone: that run twice."""

    baseline: Measurement
    candidate: Measurement
    old: Ledger
    new: Ledger
    graph: ModelGraph | None

    @property
    def change(self) -> float:
        return self.new.total_bytes / max(self.old.total_bytes, 1) - 1

    @property
    def named(self) -> tuple[str, ...]:
        return self.candidate.spec.policy.blocks

    def saved(self, fqn: str) -> int:
        cost = self.baseline.by_fqn.get(fqn)
        return cost.saved_after_forward_bytes if cost else 0


def toggled_block(fqn: str, graph: ModelGraph | None) -> str:
    """The block that you would toggle to reach `fqn`: a repeated block, else its first entry of a container."""
    parts = fqn.split(".")
    entry = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    usual = ".".join(parts[: entry + 1])
    return next((block for block in lineage(fqn) if graph and block in graph.repeated), usual)


def unit_name(fqns: tuple[str, ...]) -> str:
    """`layers.2`, of a segment `layers.2 to layers.5`; the model itself, whose name is empty, is called that."""
    return some(fqns) if len(fqns) == 1 else f"{fqns[0]} to {fqns[-1]}"


SMALL_CHANGE = 0.01
"""A change of the peak below one percent is said to be none."""
FREES_LITTLE = 0.05
"""A block that frees less than this share of what it saves is said to free almost nothing."""
SMALL_BLOCK = 0.02
"""A block that saves less than this share of all saved activations is said to save little."""


def explain(comparison: Comparison, graph: ModelGraph | None = None) -> tuple[str, ...]:
    """Sentences in plain words, most important first. Empty where a run was cut short or has no timeline to explain."""
    base, cand = comparison.baseline, comparison.candidate
    if not comparison.comparable or base.allocations is None or cand.allocations is None:
        return ()
    case = PeakCase(baseline=base, candidate=cand, old=ledger(base), new=ledger(cand), graph=graph)
    return tuple(filter(None, (rule(case) for rule in RULES)))


def explain_one(run: Measurement, graph: ModelGraph | None = None) -> tuple[str, ...]:
    """The same of one run by itself; of one that was cut short what it held until then. Empty: no timeline."""
    if run.allocations is None:
        return ()
    following = next_step(run)
    at = ledger(following)
    case = PeakCase(baseline=following, candidate=following, old=at, new=at, graph=graph or run.graph)
    if run.ran_compiled:
        rules: tuple[Callable[[PeakCase], str], ...] = (_stands, _optimizer_peak, _fixed_peak)
    else:
        rules = RULES_OF_ONE if run.complete else RULES_OF_ONE[:4]
    return tuple(filter(None, (peak_of_next_step(run), *(rule(case) for rule in rules))))


def peak_of_next_step(run: Measurement) -> str:
    """A sentence on state that `run` made and all later steps hold; empty if it does not move the peak."""
    peak, later = run.step_peak_bytes, next_step(run).step_peak_bytes
    if peak is None or later is None or mib(peak) == mib(later):
        return ""
    parts = [f"{PLURAL[role]} ({mib(size)})" for role, size in new_bytes(run).items()]
    return (
        f"This step peaks at {mib(peak)}, the next at {mib(later)} (predicted): this step made {listed(parts)}, which "
        "the next holds from its start. All that follows is about the next step."
    )


def _stands(case: PeakCase) -> str:
    run, at = case.candidate, case.new
    total = mib(at.total_bytes)
    named = dict(PLURAL)
    if not run.phases:
        named["unattributed"] = "bytes that are neither of the model nor its optimizer's"
    elif run.ran_compiled:
        named["unattributed"] = "bytes of compiled code"
    parts = [f"{named[role]} ({mib(size)})" for role, size in largest_roles(at) if size >= 0.01 * at.total_bytes]
    made_of = f"; it is made of {', '.join(parts)}" if parts else ""
    if run.complete:
        return f"The peak of {total} lies {in_place(at)}{made_of}."
    if not run.phases:
        return f"{total} were known to be held when the step failed{made_of}."
    return f"The step held at least {total}, {in_place(at)}{made_of}."


def _largest_part(case: PeakCase) -> str:
    """A phrase on the largest part that is not recomputable, such as temporaries in the head of a language model."""
    loose = [cell for cell in case.new.cells if cell.role not in (*FIXED_ROLES, "saved activation", "recomputed")]
    largest = max(loose, key=lambda cell: cell.n_bytes, default=None)
    if largest is None or not case.candidate.phases or largest.n_bytes < 0.25 * case.new.total_bytes:
        return ""
    made = f", the largest made by {largest.largest_op}" if largest.largest_op else ""
    return f"{mib(largest.n_bytes)} of it are {PLURAL[largest.role]} of {largest.place}{made}."


def _outside_modules(case: PeakCase) -> str:
    if "" in case.named:  # the policy recomputes the model as a whole, the code of its forward too
        return ""
    return outside_modules(case.new)


def _generator_states(case: PeakCase) -> str:
    """A sentence on what checkpoints keep for random numbers: in a small model it may be more than they free."""
    log, stash = case.candidate.allocations, stash_bytes(case.candidate, case.candidate.spec.policy)
    if log is None or not stash or not case.named:
        return ""
    entries = alive(log, case.new.tick)
    n_states = int(((array_of(log.role)[entries] == SAVED) & (array_of(log.n_bytes)[entries] == stash)).sum())
    if n_states * stash < 0.05 * case.new.total_bytes:
        return ""
    return (
        f"{mib(n_states * stash)} of the peak are {n_states:,} states of the random generator: each checkpoint keeps "
        f"{mib(stash)}, however small its block is. preserve_rng_state: false keeps none, if no block draws random "
        "numbers."
    )


def _older_graphs(case: PeakCase) -> str:
    return older_graphs(case.candidate)


def _ran_again(case: PeakCase) -> str:
    reruns = in_words(case.candidate)
    if not reruns:
        return ""
    return f"{reruns}: what these blocks keep was gone without any policy."


def _result(case: PeakCase) -> str:
    old, new = case.old.total_bytes, case.new.total_bytes
    if not case.named:
        return f"The candidate recomputes nothing, so its peak of {mib(new)} says nothing about recomputing."
    if abs(case.change) < SMALL_CHANGE:
        return f"The policy did not move the peak: {mib(old)} without it, {mib(new)} with it."
    word = "lowered" if case.change < 0 else "raised"
    return f"The policy {word} the peak from {from_to(old, new)} ({signed(case.change)})."


def _moved(case: PeakCase) -> str:
    old, new = place(case.old), place(case.new)
    parts = [f"{PLURAL[role]} ({mib(size)})" for role, size in largest_roles(case.new)[:2]]
    where = f"The peak moved from {old} to {new}"
    if old == new:
        where = f"The peak stayed where it was, {in_place(case.new)}"
    return f"{where}; most of it is {', then '.join(parts)}." if parts else f"{where}."


def _by_itself(case: PeakCase) -> str:
    reruns = in_words(case.baseline)
    if not reruns:
        return ""
    return (
        f"{reruns}, in both runs: what these blocks keep was gone before the policy, which can free "
        "little of it and makes them run again."
    )


def _without_effect(case: PeakCase) -> str:
    costs = case.candidate.blocks
    units = case.candidate.spec.policy.units
    again = [fqn for unit in units if unit.action != "offload" for fqn in unit.blocks]
    idle = [fqn for fqn in again if not any(cost.n_recompute for cost in costs if is_within(cost.fqn, fqn))]
    if not costs or not idle:
        return ""
    uncalled = [fqn for fqn in idle if fqn in case.candidate.by_fqn and not case.candidate.by_fqn[fqn].n_forward]
    why = f" {some(uncalled)} never ran at all." if uncalled else " Backward needed nothing from there."
    if len(idle) == len(again) == len(case.named):
        return f"The policy had no effect: none of its blocks ran forward again.{why}"
    return f"The policy had no effect on {some(idle)}: no second forward.{why}"


def _optimizer_peak(case: PeakCase) -> str:
    if case.new.phase != "optimizer":
        return ""
    roles = case.new.by_role
    fixed = roles["parameter"] + roles["gradient"] + roles["optimizer state"]
    return (
        f"The peak lies in the optimizer step, where no saved activation is left: parameters, gradients and optimizer "
        f"state hold {mib(fixed)} of {mib(case.new.total_bytes)}, and recomputing cannot lower that."
    )


def _fixed_peak(case: PeakCase) -> str:
    if case.new.phase == "optimizer" or case.new.total_bytes == 0:
        return ""
    fixed = sum(case.new.by_role[role] for role in FIXED_ROLES)
    share = fixed / case.new.total_bytes
    if share < 0.6:
        return ""
    gradients = case.new.by_role["gradient"]
    grads = f", {mib(gradients)} of them gradients that backward has made so far" if gradients else ""
    return (
        f"{mib(fixed)} of the peak ({share:.0%}) are parameters, optimizer state, gradients and inputs{grads}: "
        f"recomputing more blocks cannot free them."
    ).replace("%)", " %)")


def _own_recompute(case: PeakCase) -> str:
    again = case.new.by_role["recomputed"]
    if not again or case.new.phase not in ("recompute", "backward") or again < 0.05 * case.new.total_bytes:
        return ""
    blocks = Counter[str]()
    for cell in case.new.cells:
        if cell.role == "recomputed":
            unit = next((fqn for fqn in case.named if is_within(cell.block, fqn)), cell.block)
            blocks[unit] += cell.n_bytes
    ((block, _),) = blocks.most_common(1)
    inside = next((unit.blocks for unit in case.candidate.spec.policy.units if block in unit.blocks), (block,))
    cure = "Smaller blocks, recomputed one after another, would lower it."
    if len(inside) > 1:
        cure = f"Shorter segments would lower it: this one recomputes {len(inside)} blocks at once."
    return f"{mib(again)} of the peak are activations of {unit_name(inside)} that were just recomputed. {cure}"


def _kept_activations(case: PeakCase) -> str:
    if case.new.by_role["saved activation"] < 0.25 * case.new.total_bytes:
        return ""
    saved = Counter[str]()
    for cell in case.new.cells:
        if cell.role == "saved activation" and not is_within(cell.block, *case.named):
            saved[toggled_block(cell.block, case.graph) or cell.place] += cell.n_bytes
    if not saved:
        return ""
    places = ", ".join(with_size(place, size) for place, size in saved.most_common(3))
    n_blocks = sum(place in case.candidate.by_fqn for place in saved)
    owners = []
    if n_blocks:
        owners.append(f"{n_blocks} kept {'block' if n_blocks == 1 else 'blocks'}")
    if n_blocks < len(saved):
        owners.append("code in no block")
    return f"{mib(sum(saved.values()))} of the peak are saved activations of {' and '.join(owners)}, most in {places}."


def _saves_little(case: PeakCase) -> str:
    whole = case.baseline.saved_after_forward_bytes or 0
    small = [fqn for fqn in case.named if fqn in case.baseline.by_fqn and case.saved(fqn) < SMALL_BLOCK * whole]
    if not small or not whole:
        return ""
    total = sum(case.saved(fqn) for fqn in small)
    verb = "saves" if len(small) == 1 else "save"
    return f"{some(small)} {verb} little to begin with: {mib(total)} of {mib(whole)}."


def frees_nothing(baseline: Measurement, policy: Policy, graph: ModelGraph | None) -> str:
    """Which blocks of a policy free almost none of what they save, and who keeps it; empty if all free something."""
    freed = dict(Forecaster(baseline, graph).forecast(policy).freed_bytes)
    if graph is not None:  # layers that the observed forward left out at random are in no forecast
        for fqn in graph.saves_nothing.intersection(freed):
            del freed[fqn]
    saved = {fqn: baseline.by_fqn[fqn].saved_after_forward_bytes or 0 for fqn in freed if fqn in baseline.by_fqn}
    idle = [fqn for fqn, n_bytes in saved.items() if n_bytes and freed[fqn] < FREES_LITTLE * n_bytes]
    if not idle or graph is None:
        return ""
    behind = dict.fromkeys(edge.target for edge in graph.edges if edge.source in idle and edge.target not in idle)
    keep = "keeps" if len(behind) == 1 else "keep"
    keeper = f"behind it {some(tuple(behind)) or 'the operations'} {keep}"
    staying = sum(saved[fqn] - max(freed[fqn], 0) for fqn in idle)
    verb, its = ("frees", "its") if len(idle) == 1 else ("free", "their")
    return (
        f"{some(tuple(idle))} {verb} almost nothing: {mib(staying)} that forward saves there stay. A checkpoint keeps "
        f"{its} inputs, and {keeper} {its} outputs."
    )


def _frees_nothing(case: PeakCase) -> str:
    policy = case.candidate.spec.policy
    if not policy.units or case.baseline.spec.policy.units:
        return ""
    return frees_nothing(case.baseline, policy, case.graph)


def _first_block(case: PeakCase) -> str:
    if not case.graph or not case.graph.chain:
        return ""
    first, input_bytes = case.graph.chain[0], case.old.by_role["input"]
    if first not in case.named or not input_bytes > case.saved(first):
        return ""
    return (
        f"{first} reads the model's own input ({mib(input_bytes)}), which stays in memory whatever is recomputed: "
        f"recomputing it can free no more than {mib(case.saved(first))}."
    )


def _wasted(case: PeakCase) -> str:
    """Units that could be kept one at a time without a higher peak."""
    idle = [price for price in prices_of_keeping(case.candidate) if price.peak_change_bytes <= 0]
    idle = [price for price in idle if price.share_of_step_flops]
    if not idle or case.new.phase == "optimizer":
        return ""
    cost = max(price.share_of_step_flops or 0.0 for price in idle)
    names = some([unit_name(price.blocks) for price in idle])
    which = f"{names} could be kept" if len(idle) == 1 else f"Any one of {names} could be kept"
    sentence = f"{which} without a higher peak (predicted), for {cost:.1%} fewer FLOPs.".replace("%", " %")
    last = case.graph.repeats[-1] if case.graph and case.graph.repeats else None
    if last and any(last in price.blocks for price in idle):
        sentence += (
            f" {last} is the last of them: its backward comes first, so what it frees comes back before anything "
            "else goes."
        )
    return sentence


def next_block(run: Measurement, graph: ModelGraph | None) -> Price | None:
    """The kept block whose recompute lowers the peak of `run` most for its FLOPs; None if none lowers it."""
    if graph is None or run.step_peak_bytes is None:
        return None
    blocks = dict.fromkeys((*graph.repeats, *graph.chain))  # the repeated ones, and those between them
    small = SMALL_CHANGE * run.step_peak_bytes
    offers = [price for price in prices(run, blocks, graph=graph) if price.peak_change_bytes <= -small]
    return max(offers, key=lambda price: (price.mib_per_percent or 0.0, -price.peak_bytes), default=None)


def _next_best(case: PeakCase) -> str:
    best = next_block(case.candidate, case.graph)
    if best is None:
        return ""
    cost = f" for {best.share_of_step_flops:.1%} more FLOPs".replace("%", " %") if best.share_of_step_flops else ""
    word = "Next" if case.named else "First"
    peak = f"{mib(best.peak_bytes)} (predicted)"
    return f"{word}, {unit_name(best.blocks)} recomputed would lower the peak to {peak}{cost}."


RULES: tuple[Callable[[PeakCase], str], ...] = (
    _result,
    _moved,
    _by_itself,
    _without_effect,
    _optimizer_peak,
    _fixed_peak,
    _own_recompute,
    _older_graphs,
    _outside_modules,
    _generator_states,
    _kept_activations,
    _saves_little,
    _frees_nothing,
    _first_block,
    _wasted,
    _next_best,
)
RULES_OF_ONE: tuple[Callable[[PeakCase], str], ...] = (
    _stands,
    _largest_part,
    _older_graphs,
    _outside_modules,
    _ran_again,
    _without_effect,
    _optimizer_peak,
    _fixed_peak,
    _own_recompute,
    _kept_activations,
    _wasted,
    _next_best,
)
"""The first four hold for a step that was cut short as well."""
