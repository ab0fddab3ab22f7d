"""A policy by its name, its blocks or its file, on the model that it is for.

In a policy file patterns become names. A file of a model that has changed since is applied by name, with a sentence.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.names import listed, some
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.block_names import differences, expanded, is_pattern, matches, shape_of
from explorer.plan.policy.presets import PRESETS, is_preset, preset
from explorer.record.files import PolicyFile, Reading
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import Policy

SUFFIXES = ("yaml", "yml", "json")
"""Endings of policy files."""


def read(text: str, graph: ModelGraph) -> Reading:
    """The policy that the file `text` means on the model of `graph`. Raises UnreadableFile and InvalidPolicy."""
    return on_model(policy_file.loads(text), graph)


def named(name: str, graph: ModelGraph) -> Reading:
    """The policy of a preset, of blocks, or of a file on `graph`. Raises InvalidPolicy and UnreadableFile."""
    blocks = name.split(",")
    if is_preset(name):
        return Reading(file=PolicyFile(policy=preset(name, graph)))
    if is_pattern(name) or all(block in graph.by_fqn for block in blocks):
        called = [block.fqn for block in graph.blocks if block.n_calls]
        policy = expanded(Policy.recompute(blocks), called)
        return Reading(file=PolicyFile(policy=policy))
    if not Path(name).exists() and not name.endswith(tuple(f".{suffix}" for suffix in SUFFIXES)):
        raise InvalidPolicy(
            f"{name} is neither a preset, nor a block, nor a file.",
            hint=nearest(name, (*PRESETS, *graph.by_fqn))
            or f"Presets are {', '.join(PRESETS)}; `python -m explorer graph MODEL` lists the blocks.",
        )
    return load(name, graph)


def load(path: str | os.PathLike[str], graph: ModelGraph) -> Reading:
    """`read` of a file; every error begins with the name of the file."""
    return policy_file.read_from(path, lambda text: read(text, graph))


def on_model(file: PolicyFile, graph: ModelGraph) -> Reading:
    """`file` by the names of its blocks. Raises InvalidPolicy if the model has no such block, or a pattern no match."""
    called = [block.fqn for block in graph.blocks if block.n_calls]
    policy = expanded(file.policy, called)
    changed = _changed(file, graph)
    _refuse_unknown_blocks(policy, graph, changed)
    return Reading(
        file=replace(file, policy=policy),
        changed=changed,
        notes=_patterns(file.policy, called),
    )


def _patterns(policy: Policy, called: list[str]) -> tuple[str, ...]:
    notes = []
    for unit in policy.units:
        if any(map(is_pattern, unit.blocks)):
            pattern, *rows = map(" and ".join, (unit.blocks, *matches(unit, called)))
            notes.append(f"{pattern} stands for {len(rows)} {'unit' if len(rows) == 1 else 'units'}: {some(rows)}.")
    return tuple(dict.fromkeys(notes))


def _changed(file: PolicyFile, graph: ModelGraph) -> str:
    """Differences between the model and the file's model; empty if a handwritten file describes no model."""
    if file.fingerprint in (None, graph.fingerprint):
        return ""
    names = differences(file.blocks, shape_of(block.fqn for block in graph.blocks)) if file.blocks else ""
    what = names or ("kinds or parameters of its blocks differ" if file.blocks else "names, kinds or parameters differ")
    made_for = _in_words(file.model) if file.model else "another model"
    return f"It was made for {made_for}; {_in_words(graph.model)} has changed since or is another one: {what}."


def _refuse_unknown_blocks(policy: Policy, graph: ModelGraph, changed: str) -> None:
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
