"""Collectives of a rank's step: totals by kind and phase, and those that a policy makes for nothing.

A recompute may repeat a collective: a sum of tensor parallelism whose result is not kept, or the gather of a unit of
FSDP2 inside the recomputed block. Such a unit is gathered for the recompute, freed, and gathered again for backward.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from explorer.plan.names import listed
from explorer.plan.sizes import mib
from explorer.record.allocations import Collective, CollectiveKind
from explorer.record.measurement import Measurement

FUNCTIONAL: dict[CollectiveKind, str] = {
    "all-reduce": "_c10d_functional.all_reduce.default",
    "reduce-scatter": "_c10d_functional.reduce_scatter_tensor.default",
    "all-gather": "_c10d_functional.all_gather_into_tensor.default",
    "all-to-all": "_c10d_functional.all_to_all_single.default",
}
"""Operators of collectives inside a model, for `save_ops`."""


def sent_bytes(run: Measurement) -> int:
    """Bytes that the rank sends in its step, by the ring algorithm."""
    return sum(collective.sent_bytes for collective in run.collectives)


def collective_rows(run: Measurement) -> list[dict[str, object]]:
    """Table rows, one a kind and phase."""
    groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for collective in run.collectives:
        groups[collective.kind, collective.phase].append(collective)
    return [
        {
            "collective": kind,
            "phase": phase,
            "calls": len(calls),
            "tensors": mib(sum(call.n_bytes for call in calls)),
            "sent": mib(sum(call.sent_bytes for call in calls)),
            "blocks": listed(list(dict.fromkeys(call.block or "the model" for call in calls)), 3),
        }
        for (kind, phase), calls in groups.items()
    ]


def repeated(run: Measurement) -> tuple[str, ...]:
    """A sentence on each kind of collective that a recompute repeats, with a policy that avoids it."""
    gathers = Counter((call.block, call.phase) for call in run.collectives if call.kind == "all-gather")
    # Units of FSDP2 that are gathered in the recompute and again in backward.
    units = {block for block, phase in gathers if phase == "recompute" and gathers[block, "backward"]}
    sentences = []
    if units:
        again = sum(call.n_bytes for call in run.collectives if call.phase == "recompute" and call.block in units)
        sentences.append(
            f"{listed(sorted(units), 3)} {'is' if len(units) == 1 else 'are'} gathered twice in backward, once for the "
            f"recompute around it and once for its own backward: {mib(again)} for nothing. Recompute blocks inside the "
            "unit, or the unit itself, instead of what stands around it."
        )
    inside = [call for call in run.collectives if call.phase == "recompute" and call.block not in units]
    # An all-gather is one of a unit's parameters if reduce-scatters of gradients have the same block.
    reduced = {c.block for c in run.collectives if c.kind == "reduce-scatter" and c.phase == "backward"}
    for kind, operator in FUNCTIONAL.items():
        calls = [call for call in inside if call.kind == kind and not (kind == "all-gather" and call.block in reduced)]
        if calls:
            sent = sum(call.sent_bytes for call in calls)
            sentences.append(
                f"The recompute repeats {len(calls)} {kind}{'s' if len(calls) > 1 else ''} ({mib(sent)} sent again). "
                f"A policy that keeps their results repeats none: action save_ops with {operator}."
            )
    return tuple(sentences)
