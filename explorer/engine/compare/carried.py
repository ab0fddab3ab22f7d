"""Differences of all parameters after the last step, and of all other state that a model carries to its next step.

Tensors and floats are compared with float64, other values must be equal. judgement.py compares gradients and buffers
beside it and orders the runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from msgspec import structs
from msgspec.structs import replace
from torch import Tensor

from explorer.engine.compare.diffs import PRESENCE, Yardstick, difference, differences, is_floating, step_distances
from explorer.engine.compare.outcome import Yardsticks, unequal_state
from explorer.engine.compare.programs import Outcome
from explorer.engine.state.state_diff import StateKey, leaves, same_state, short_text
from explorer.record.comparison import GradientDiff, ParameterDiff, StateDiff, TensorDiff

Kind = Literal["parameter", "frozen parameter", "buffer", "attribute", "gradient"]


def parameter_differences(
    baseline: Outcome, candidate: Outcome, yardsticks: Yardsticks, gradients: Collection[GradientDiff]
) -> tuple[ParameterDiff, ...]:
    """Differences of all parameters after the last step; `gradients` of every step show which differences are rounding.

    If the optimizers of both runs got equal gradients, the yardstick is the step alone: only the step rounds. Rounding
    of gradients then explains nothing, unless a user's step moves its parameters without an optimizer of torch.
    """
    names = {diff.name for diff in gradients}
    unequal = {diff.name for diff in gradients if not diff.bitwise}
    beyond_rounding = {diff.name for diff in gradients if diff.verdict not in ("bitwise equal", "rounding")}
    equal = baseline.trained if candidate.led else names - unequal
    explained = unequal
    if baseline.stepped:
        explained = set()
    elif baseline.stepped is None:
        explained = names | baseline.trained
    explained -= beyond_rounding | baseline.moved.keys()
    before = baseline.after[-2] if len(baseline.after) > 1 else {}
    alone = {name: before[name] for name in equal if name in before and name not in baseline.moved}
    yardstick = dataclasses.replace(yardsticks.of("parameters"), before=alone)
    diffs = differences(ParameterDiff, baseline.parameters, candidate.parameters, yardstick)
    return tuple(
        replace(
            diff,
            trained=diff.name in baseline.trained,
            gradients_round=diff.name in explained,
            **_step(diff, baseline, candidate, before.get(diff.name)),
        )
        for diff in diffs
    )


def _step(diff: ParameterDiff, baseline: Outcome, candidate: Outcome, before: Tensor | None) -> dict[str, float | None]:
    if diff.bitwise or diff.max_abs is None or before is None or not is_floating(before):
        return {}
    left, right = baseline.parameters[diff.name], candidate.parameters[diff.name]
    return step_distances(left, right, before) if left is not None and right is not None else {}


def state_differences(
    baseline: Outcome, candidate: Outcome, yardsticks: Yardsticks, unjudged: Collection[StateKey]
) -> tuple[StateDiff, ...]:
    """Differences of attributes, buffers and moved parameters after each step, without equal values.

    Forward or backward moves a parameter in momentum encoders, averages, and optimizers inside backward.
    """
    diffs = []
    for diff in differences(TensorDiff, baseline.moved, candidate.moved, yardsticks.of("moved")):
        if not diff.bitwise:
            kind: Kind = "parameter" if diff.name in baseline.trained else "frozen parameter"
            diffs.append(_state_diff(diff, diff.name.rpartition(".")[0], kind, 1))
    for i, (left, right) in enumerate(zip(baseline.states, candidate.states)):
        runs = [outcome.states[i] if outcome else {} for outcome in (yardsticks.rerun, yardsticks.exact)]
        for key in unequal_state(left, right):
            if key not in unjudged and (i or key[2] != "buffer"):  # buffers of the first step: `Comparison.buffers`
                diffs.append(_furthest(key, i + 1, [state.get(key) for state in (left, right, *runs)], yardsticks))
    return tuple(diffs)


def _furthest(key: StateKey, step: int, values: list[object], yardsticks: Yardsticks) -> StateDiff:
    """The largest difference within one attribute. `values` are of baseline, candidate, rerun and reference."""
    left, right, rerun, exact = (dict(leaves(value)) if value is not None else {} for value in values)
    yardstick = yardsticks.yardstick(_tensors(rerun), _tensors(exact))
    parts = [_part(path, left, right, yardstick) for path in {**left, **right}]
    wrong = [diff for diff in parts if not diff.bitwise]
    worst = max(wrong, key=lambda diff: (diff.verdict == "different", diff.relative_norm or 0.0))
    gradient = worst.verdict == "different" and worst.name.endswith(".grad")
    kind: Kind = "gradient" if gradient else key[2]
    furthest = _state_diff(replace(worst, name=f"{key[0]}.{key[1]}".lstrip(".")), key[0], kind, step)
    return replace(furthest, baseline_value=short_text(values[0]), candidate_value=short_text(values[1]))


def _part(path: str, left: dict[str, object], right: dict[str, object], yardstick: Yardstick) -> TensorDiff:
    one, other = (_tensors({path: side[path]}).get(path) if path in side else None for side in (left, right))
    if one is not None and other is not None:
        return difference(TensorDiff, path, one, other, yardstick)
    presence = PRESENCE[path in left, path in right]
    equal = presence == "both" and same_state(left[path], right[path])
    kind = type(left[path] if path in left else right[path]).__name__
    return TensorDiff(name=path, shape=(), dtype=kind, presence=presence, bitwise=equal)


def _tensors(parts: Mapping[str, object]) -> dict[str, Tensor | None]:
    """The parts that are tensors or floats; a Python float becomes a float64 tensor."""
    return {
        path: part if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.float64)
        for path, part in parts.items()
        if isinstance(part, (Tensor, float))
    }


def _state_diff(diff: TensorDiff, block: str, kind: Kind, step: int) -> StateDiff:
    return StateDiff(**structs.asdict(diff), block=block, kind=kind, step=step)
