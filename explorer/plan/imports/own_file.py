"""A policy file on a model: patterns become names, and a model that has changed since is told about."""

from __future__ import annotations

import msgspec

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.names import listed, some
from explorer.plan.policy.pattern import expanded, is_pattern, matches
from explorer.plan.policy.shape import differences, shape_of
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import Policy
from explorer.record.policy_file import PolicyFile, Reading

OWN = "a policy file"


def on_model(file: PolicyFile, graph: ModelGraph) -> Reading:
    """`file` by the names of its blocks. Raises InvalidPolicy where a name is not there, or a pattern matches none."""
    called = [block.fqn for block in graph.blocks if block.n_calls]
    policy = expanded(file.policy, called)
    changed = _changed(file, graph)
    _refuse_strangers(policy, graph, changed)
    return Reading(
        source=OWN,
        file=msgspec.structs.replace(file, policy=policy),
        changed=changed,
        notes=_patterns(file.policy, called),
    )


def _patterns(policy: Policy, called: list[str]) -> tuple[str, ...]:
    units = [unit for unit in dict.fromkeys(policy.units) if any(map(is_pattern, unit.blocks))]
    rows_of = {" and ".join(unit.blocks): matches(unit, called) for unit in units}
    return tuple(
        f"{pattern} stands for {len(rows)} {'unit' if len(rows) == 1 else 'units'}: "
        f"{some([' and '.join(row) for row in rows])}."
        for pattern, rows in rows_of.items()
    )


def _changed(file: PolicyFile, graph: ModelGraph) -> str:
    """A file that was written by hand says nothing of its model, and is judged by its names alone."""
    if file.fingerprint in (None, graph.fingerprint):
        return ""
    names = differences(file.blocks, shape_of(block.fqn for block in graph.blocks)) if file.blocks else ""
    what = names or ("kinds or parameters of its blocks differ" if file.blocks else "names, kinds or parameters differ")
    made_for = _in_words(file.model) if file.model else "another model"
    return f"It was made for {made_for}; {_in_words(graph.model)} has changed since or is another one: {what}."


def _refuse_strangers(policy: Policy, graph: ModelGraph, changed: str) -> None:
    missing = [fqn for fqn in dict.fromkeys(policy.blocks) if fqn not in graph.by_fqn]
    if missing:
        raise InvalidPolicy(
            f"{_in_words(graph.model)} has no block {listed(missing, 5)} "
            f"({len(missing)} of the {len(policy.blocks)} that the policy names).{f' {changed}' if changed else ''}",
            hint=nearest(missing[0], graph.by_fqn) or "`python -m explorer graph MODEL` lists the blocks.",
        )


def _in_words(model: ModelRef) -> str:
    """`sample_models/gpt.py, size gpu, n_layers=4`"""
    size = [f"size {model.size}"] if model.size else []
    return ", ".join([model.target, *size, *(f"{name}={value}" for name, value in model.arguments.items())])
