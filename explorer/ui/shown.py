"""What was measured, and whether it is about the policy that is drawn now: the facts behind strip, graph and charts."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from explorer.plan.hazards import hazards
from explorer.plan.ledger import ledger
from explorer.record.comparison import Comparison
from explorer.record.forecast import Forecast
from explorer.record.graph import ModelGraph
from explorer.record.ledger import Ledger
from explorer.record.measurement import Measurement
from explorer.ui import state as states
from explorer.ui import work
from explorer.ui.forecast import price_tags
from explorer.ui.labels import Facts
from explorer.ui.state import State

Picked = tuple[str, int] | None
"""Run and tick of a point in the timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What was measured, and whether it is about the policy that is drawn now."""

    comparison: Comparison | None
    baseline: Measurement | None
    baseline_key: str | None
    stale: bool
    other_options: bool = False
    """Whether the baseline ran under options, a seed or a device that were changed since."""

    @property
    def candidate(self) -> Measurement | None:
        """Only if it ran under the policy that is drawn now, to its end."""
        found = self.comparison
        return found.candidate if found is not None and found.comparable and not self.stale else None

    @property
    def freshness(self) -> str:
        if self.comparison is None:
            if self.baseline is None:
                return "nothing"
            if self.other_options:
                return "other options"
            return "pinned" if self.baseline.spec.policy.units else "baseline"
        if self.stale:
            return "stale"
        return "fresh" if self.comparison.comparable else "failed"


def shown(state: State) -> Shown:
    """The last comparison and the baseline that holds for the run as it is drawn now."""
    comparison: Comparison | None = work.result(state, "shown")
    baseline: Measurement | None = work.result(state, "baseline")
    key = state["baseline"]
    if comparison is not None and comparison.baseline.spec == states.baseline_of(state):
        baseline, key = comparison.baseline, state["shown"]
    stale = comparison is not None and comparison.candidate.spec != states.spec_of(state)
    bare = msgspec.structs.replace(states.spec_of(state), policy=baseline.spec.policy) if baseline else None
    return Shown(
        comparison=comparison,
        baseline=baseline,
        baseline_key=key,
        stale=stale,
        other_options=baseline is not None and baseline.spec != bare,
    )


def facts(state: State, graph: ModelGraph, known: Shown, predicted: Forecast) -> Facts:
    """Everything that stands on the blocks."""
    spec = states.spec_of(state)
    whole = known.baseline if known.baseline is not None and known.baseline.complete else None
    priced = known.candidate or (whole if not spec.policy.units else None)
    drawn = known.comparison.candidate if known.comparison is not None else None
    return Facts(
        graph=graph,
        policy=spec.policy,
        baseline=whole,
        candidate=known.candidate,
        freed_bytes=predicted.freed_bytes,
        prices=price_tags(priced, graph, key=f"{state['shown'] if known.candidate else known.baseline_key}"),
        hazards=hazards(graph, spec.policy, spec.plan, spec),
        alive=ledger_of(known.baseline, drawn, picked(state)),
    )


def picked(state: State) -> Picked:
    """The point of the timeline that was clicked."""
    return (state["tick"][0], state["tick"][1]) if state["tick"] else None


def ledger_of(baseline: Measurement | None, candidate: Measurement | None, at: Picked) -> Ledger | None:
    """What is alive at the picked point; None where nothing is picked or that run has no timeline."""
    if at is None:
        return None
    run = candidate if at[0] == "candidate" else baseline
    if run is None or run.allocations is None or at[1] > run.allocations.n_ticks:
        return None
    return ledger(run, at[1])
