"""The same steps in float64: the distance of the baseline from exact is the scale of rounding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch
from torch import Tensor

from explorer.engine.bench.step import AUTOCAST, prepare
from explorer.engine.compare.diffs import is_floating, relative_distance
from explorer.engine.compare.outcome import Outcome, Tensors, not_reproducible_because, take
from explorer.engine.compare.same_branches import Branches, SameBranches
from explorer.engine.compare.same_draws import SameDraws
from explorer.engine.model.loaded import Loaded
from explorer.engine.state.rng import RngState, seed_everything
from explorer.engine.state.snapshot import SharedSnapshot
from explorer.errors import said_by
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec


def reference(spec: RunSpec, loaded: Loaded, baseline: Outcome) -> tuple[Outcome | None, str]:
    """The step without a policy in float64; or None with the reason: it fails in float64 or is too far away.

    The run draws the baseline's random numbers: dropout on the CPU does so anyway, SameDraws covers other draws. A run
    with other numbers, as on another device, shows by its distance from the baseline. A run that is too far away is
    repeated with the decisions of the baseline, see SameBranches.
    """
    start = SharedSnapshot(loaded.model)
    epsilon = coarsest_epsilon(spec, baseline.gradients)
    try:
        outcome = _exact(spec, loaded, baseline, nullcontext())
    except Exception as error:  # a type written into the model, or a kernel without float64: not an error of the run
        return None, does_not_run(error)
    draws = _draws(spec, loaded, baseline)
    because = too_far(outcome, baseline, epsilon, draws=draws)
    if because and (alike := _decided_alike(spec, loaded, baseline, start)) and not too_far(alike, baseline, epsilon):
        return alike, ""
    return (None, because) if because else (outcome, "")


def _exact(spec: RunSpec, loaded: Loaded, baseline: Outcome, guided: AbstractContextManager[object]) -> Outcome:
    exact = msgspec.structs.replace(spec, dtype="float64", autocast="none", policy=KEEP_ALL, plan=None)
    trainee = prepare(exact, loaded)
    with SameDraws(most_common_type(baseline.gradients)), guided:
        return take(trainee, lead=baseline)


def _decided_alike(spec: RunSpec, loaded: Loaded, baseline: Outcome, start: SharedSnapshot) -> Outcome | None:
    """The float64 outcome with the baseline's decisions; None if it decides nothing or is not reproducible."""
    try:
        start.restore()
        trainee = prepare(msgspec.structs.replace(spec, policy=KEEP_ALL, plan=None), loaded)
        with Branches() as branches:
            again = take(trainee, like=baseline)
        if not branches.decisions or not_reproducible_because(baseline, again):
            return None
        start.restore()
        return _exact(spec, loaded, baseline, SameBranches(branches.decisions))
    except Exception:  # the plain float64 run succeeded: other code ran here, or no memory is left for the decisions
        return None


def does_not_run(error: Exception) -> str:
    """The reason for a missing reference if the run in float64 raised an error."""
    return f"The model does not run in float64: {said_by(error)}."


def _draws(spec: RunSpec, loaded: Loaded, baseline: Outcome) -> bool:
    """Whether the baseline's step moved any generator."""
    seed_everything(spec.seed)
    start = RngState.capture(loaded.model).positions()
    return any(position != start.get(name, position) for name, position in baseline.rng.items())


def too_far(exact: Outcome, baseline: Outcome, epsilon: float, *, draws: bool = True) -> str:
    """The reason why a float64 run cannot be a reference: its distance from the baseline. Empty if it can."""
    distance = relative_distance(exact.gradients, baseline.gradients)
    if distance is not None and distance <= math.sqrt(epsilon):
        return ""
    far = "an unknown part" if distance is None else f"{distance:.1e}"
    numbers = "other random numbers" if draws else "no generator moved, so random numbers of a source without a seed"
    return (
        f"In float64 the gradients lie {far} of their norm away from the baseline's: {numbers}, other branches (a ReLU "
        "near zero, a maximum of two), or a model that amplifies rounding."
    )


def most_common_type(gradients: Tensors) -> torch.dtype:
    """The type of most gradients: the type in which random numbers are drawn."""
    types = Counter(tensor.dtype for tensor in gradients.values() if tensor is not None and tensor.is_floating_point())
    return types.most_common(1)[0][0] if types else torch.get_default_dtype()


def coarsest_epsilon(spec: RunSpec, gradients: Mapping[str, Tensor | None]) -> float:
    """Machine epsilon of the coarsest floating type of the run, from its autocast type and its gradients."""
    return epsilon_of(gradients, {AUTOCAST[spec.autocast]} if spec.autocast != "none" else set())


def epsilon_of(gradients: Mapping[str, Tensor | None], beside: Collection[torch.dtype]) -> float:
    """Machine epsilon of the coarsest floating type among `beside` and the types of `gradients`."""
    types = {tensor.dtype for tensor in gradients.values() if tensor is not None and is_floating(tensor)} | {*beside}
    return max(torch.finfo(dtype).eps for dtype in types or {torch.get_default_dtype()})
