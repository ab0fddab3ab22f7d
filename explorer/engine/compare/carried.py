"""Compares the state that a model carries to its next step, leaf by leaf, between baseline and candidate.

Tensors and floats are compared with float64, as gradients are; other values must be equal. An attribute in which two
runs of the baseline differ (an address, a clock) is left out and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from explorer.engine.compare.diffs import Yardstick, difference, differences
from explorer.engine.compare.outcome import Outcome, Yardsticks
from explorer.engine.state.state_diff import BEYOND, StateKey, leaves, same_state, short_text
from explorer.record.comparison import Presence, StateDiff, TensorDiff

Kind = Literal["parameter", "frozen parameter", "buffer", "attribute", "gradient"]


def unstable(first: Outcome, second: Outcome) -> frozenset[StateKey]:
    """Attributes and buffers in which two runs of one spec differ after any step."""
    pairs = zip(first.states, second.states)
    return frozenset(
        key for left, right in pairs for key in left.keys() | right.keys()
        if not same_state(left.get(key), right.get(key))
    )  # fmt: skip


def not_walked(outcome: Outcome) -> Iterator[StateKey]:
    """Attributes whose copy is incomplete, because the walk reached a limit."""
    for key, value in (outcome.states[-1] if outcome.states else {}).items():
        if any(part == BEYOND for _, part in leaves(value) if isinstance(part, str)):
            yield key


def carried(
    baseline: Outcome, candidate: Outcome, yardsticks: Yardsticks, unjudged: Iterable[StateKey]
) -> tuple[StateDiff, ...]:
    """Differences of attributes, buffers and moved parameters after each step, without equal values."""
    skipped = set(unjudged)
    differences = list(_moved(baseline, candidate, yardsticks))
    for i, (left, right) in enumerate(zip(baseline.states, candidate.states)):
        runs = [outcome.states[i] if outcome else {} for outcome in (yardsticks.rerun, yardsticks.exact)]
        for key in [*left, *(key for key in right if key not in left)]:
            if key in skipped or (i == 0 and key[2] == "buffer"):  # buffers of the first step: `Comparison.buffers`
                continue
            if not same_state(left.get(key), right.get(key)):
                differences.append(
                    _furthest(key, i + 1, [state.get(key) for state in (left, right, *runs)], yardsticks)
                )
    return tuple(differences)


def n_looked_at(outcome: Outcome) -> int:
    """Attributes and buffers of one run."""
    return max(map(len, outcome.states), default=0)


def names(keys: Iterable[StateKey]) -> tuple[str, ...]:
    """The keys as sorted text, such as `blocks.0.step`."""
    return tuple(sorted(_name(key) for key in keys))


def _moved(baseline: Outcome, candidate: Outcome, yardsticks: Yardsticks) -> Iterator[StateDiff]:
    """Differences of parameters that forward or backward moved: momentum encoders, averages, a step in backward."""
    for diff in differences(TensorDiff, baseline.moved, candidate.moved, yardsticks.of("moved")):
        if not diff.bitwise:
            block = diff.name.rpartition(".")[0]
            kind: Kind = "parameter" if diff.name in baseline.trained else "frozen parameter"
            yield _state_diff(diff, block=block, kind=kind, step=1)


def _furthest(key: StateKey, step: int, values: list[Any], yardsticks: Yardsticks) -> StateDiff:
    """The largest difference within one attribute. `values` are of baseline, candidate, rerun and reference."""
    left, right, rerun, exact = (dict(leaves(value)) if value is not None else {} for value in values)
    yardstick = yardsticks.yardstick(_tensors(rerun), _tensors(exact))
    parts = [_part(path, left, right, yardstick) for path in {**left, **right}]
    wrong = [diff for diff in parts if not diff.bitwise]
    worst = max(wrong, key=lambda diff: (diff.verdict == "different", diff.relative_norm or 0.0))
    gradient = worst.verdict == "different" and worst.name.endswith(".grad")
    kind: Kind = "gradient" if gradient else key[2]
    furthest = _state_diff(replace(worst, name=_name(key)), block=key[0], kind=kind, step=step)
    return replace(furthest, baseline_value=short_text(values[0]), candidate_value=short_text(values[1]))


def _part(path: str, left: dict[str, Any], right: dict[str, Any], yardstick: Yardstick) -> TensorDiff:
    one, other = (_tensors({path: side[path]}).get(path) if path in side else None for side in (left, right))
    if one is not None and other is not None:
        return difference(TensorDiff, path, one, other, yardstick)
    presence: Presence = "baseline only" if path not in right else "both" if path in left else "candidate only"
    equal = path in left and path in right and same_state(left[path], right[path])
    kind = type(left[path] if path in left else right[path]).__name__
    return TensorDiff(name=path, shape=(), dtype=kind, presence=presence, bitwise=equal)


def _tensors(parts: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """The parts that are tensors or floats; a Python float becomes a float64 tensor."""
    return {
        path: part if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.float64)
        for path, part in parts.items()
        if isinstance(part, (Tensor, float))
    }


def _state_diff(diff: TensorDiff, *, block: str, kind: Kind, step: int) -> StateDiff:
    plain = {name: getattr(diff, name) for name in TensorDiff.__struct_fields__}
    return StateDiff(**plain, block=block, kind=kind, step=step)


def _name(key: StateKey) -> str:
    return f"{key[0]}.{key[1]}".lstrip(".")
