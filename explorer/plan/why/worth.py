"""Which submodules are worth recomputing: what each kind saves, the peak without it, and why nothing is gained.

Each row is a forecast from one run. peak.py explains the runs of one policy. Here no policy is chosen yet, and every
kind of submodule is tried: blocks, and what is inside them.
"""

from __future__ import annotations

import re
from collections import defaultdict

from msgspec.structs import replace

from explorer.plan.memory.ledger import in_place
from explorer.plan.names import Fqns, lineage, listed
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.sizes import mib, signed
from explorer.plan.why.caveats import why_not_predicted
from explorer.plan.why.peak import FREES_LITTLE, SMALL_BLOCK, SMALL_CHANGE
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast, Front
from explorer.record.policy import Policy

MOST_ROWS = 10
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def worth_recomputing(run: Measurement, graph: ModelGraph | None) -> list[dict[str, str]]:
    """A row for each kind of submodule that saves much, the lowest peak first. Empty for a run with a policy.

    Submodules of one kind have one class and names that differ in numbers alone, `blocks.*.mlp`.
    """
    forecaster = Forecaster(run, graph)
    baseline = forecaster.baseline
    whole = 0 if baseline is None else baseline.saved_after_forward_bytes or 0
    if baseline is None or graph is None or not whole or run.spec.policy.units or not baseline.step_peak_bytes:
        return []
    rows: list[tuple[int, dict[str, str]]] = []
    for name, fqns in _kinds(graph).items():
        fqns = [fqn for fqn in fqns if fqn in baseline.by_fqn]
        saved = sum(baseline.by_fqn[fqn].saved_after_forward_bytes or 0 for fqn in fqns)
        if saved < SMALL_BLOCK * whole:
            continue
        policy = Policy.recompute(fqns)
        forecast = forecaster.forecast(policy)
        peak = forecast.step_peak_bytes
        row = {"worth recomputing?": name, "saves": mib(saved), "peak": "", "change": "", "FLOPs": ""}
        if peak is not None:
            row |= {"peak": mib(peak), "change": _percent(peak / baseline.step_peak_bytes - 1)}
        if forecast.flop_ratio is not None:
            row["FLOPs"] = _percent(forecast.flop_ratio - 1)
        row["why no gain"] = _reason(forecaster, policy, forecast, graph)
        rows.append((baseline.step_peak_bytes if peak is None else peak, row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])[:MOST_ROWS]]


def sentences(run: Measurement, graph: ModelGraph | None) -> list[str]:
    """The rows of `worth_recomputing` with their reasons, a sentence each."""
    rows = worth_recomputing(run, graph)
    return [f"{row['worth recomputing?']}: {row['change']} {row['why no gain']}".rstrip() for row in rows]


def with_reasons(front: Front, run: Measurement, graph: ModelGraph) -> Front:
    """A refusal also says what recomputing each kind of submodule changes, and why it gains nothing."""
    if not front.refusal:
        return front
    return replace(front, refusal=" ".join((front.refusal, *sentences(run, graph))))


def _kinds(graph: ModelGraph) -> dict[str, list[str]]:
    """Names of submodules by their kind: `head`, or `blocks.*.mlp (12 MLP)`."""
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for block in graph.blocks:
        if block.fqn and block.n_calls:
            kinds[_NUMBER.sub("*", block.fqn), block.kind].append(block.fqn)
    return {
        fqns[0] if len(fqns) == 1 else f"{pattern} ({len(fqns)} {kind})": fqns
        for (pattern, kind), fqns in kinds.items()
    }


def _reason(forecaster: Forecaster, policy: Policy, forecast: Forecast, graph: ModelGraph) -> str:
    """Why recomputing lowers no peak; empty if it lowers it."""
    baseline, at = forecaster.baseline, forecaster.at_peak(policy)
    if baseline is None or forecast.step_peak_bytes is None or at is None:
        return why_not_predicted(policy, graph, forecast, baseline)
    before = baseline.step_peak_bytes or 0
    if forecast.step_peak_bytes <= (1 - SMALL_CHANGE) * before:
        return ""
    if at.phase == "optimizer":
        return "The peak lies in the optimizer step, where no saved activation is left."
    saved = sum(baseline.by_fqn[fqn].saved_after_forward_bytes or 0 for fqn in policy.blocks)
    freed = max(0, sum(forecast.freed_bytes.values()))
    if freed < FREES_LITTLE * saved:
        readers = listed(_readers(policy.blocks, graph)) or "operations behind it"
        return f"It frees {mib(freed)}: a checkpoint keeps its inputs, and {readers} its outputs."
    again = at.by_role["recomputed"]
    if again >= SMALL_CHANGE * before:
        return f"{mib(again)} of the peak are then its own rerun. Smaller blocks would lower it."
    return f"It frees {mib(freed)} of the forward; the peak lies {in_place(at)}, where these are gone or back."


def _readers(blocks: Fqns, graph: ModelGraph) -> list[str]:
    """Kinds of submodules that read what `blocks` return."""
    named = set(blocks)
    inside = {block.fqn for block in graph.blocks if not named.isdisjoint(lineage(block.fqn))}
    edges = (edge for edge in graph.edges if edge.source in inside and edge.target not in inside)
    return list(dict.fromkeys(_NUMBER.sub("*", edge.target) for edge in edges))


def _percent(change: float) -> str:
    text = signed(change)
    return text[1:] if text[1:] == "0 %" else text
