"""The same steps in float64: how far from exact the baseline itself is, which is what rounding is held against."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from explorer.engine.compare.diffs import is_floating, relative_distance
from explorer.engine.compare.outcome import Outcome, Tensors, take
from explorer.engine.compare.same_draws import SameDraws
from explorer.engine.model.loaded import Loaded
from explorer.engine.step import AUTOCAST, prepare
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec


def reference(spec: RunSpec, loaded: Loaded, baseline: Outcome) -> tuple[Outcome | None, str]:
    """The bare step in float64; or None, and why: the model cannot run in it, or went another way there.

    It draws the random numbers of the baseline (dropout on the CPU does so by itself, see SameDraws for the others).
    Where it does not, on another device say, it is recognised by its distance from the baseline.
    """
    exact = msgspec.structs.replace(spec, dtype="float64", autocast="none", policy=KEEP_ALL, plan=None)
    try:
        trainee = prepare(exact, loaded)
        with SameDraws(_most_common_type(baseline.gradients)):
            outcome = take(trainee, lead=baseline)
    except Exception as error:  # a type written into the model, a kernel without float64: no reference, and no fault
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"The model does not run in float64: {type(error).__name__}: {first}"
    distance = relative_distance(outcome.gradients, baseline.gradients)
    if distance is not None and distance <= math.sqrt(coarsest_epsilon(spec, baseline.gradients)):
        return outcome, ""
    far = "an unknown part" if distance is None else f"{distance:.1e}"
    return None, (
        f"In float64 the gradients lie {far} of their norm away from the baseline's: other random numbers, "
        "other branches, or a model too sensitive to judge rounding by."
    )


def _most_common_type(gradients: Tensors) -> torch.dtype:
    types = Counter(tensor.dtype for tensor in gradients.values() if tensor is not None and tensor.is_floating_point())
    return types.most_common(1)[0][0] if types else torch.get_default_dtype()


def coarsest_epsilon(spec: RunSpec, gradients: Mapping[str, Tensor | None]) -> float:
    """Machine epsilon of the coarsest floating type that the run computes in, by the types of its gradients."""
    types = {tensor.dtype for tensor in gradients.values() if tensor is not None and is_floating(tensor)}
    types |= {AUTOCAST[spec.autocast]} if spec.autocast != "none" else set()
    return max(torch.finfo(dtype).eps for dtype in types or {torch.get_default_dtype()})
