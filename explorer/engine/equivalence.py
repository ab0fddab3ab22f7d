"""What a step leaves behind, taken so that two runs can be held against each other bit by bit.

    equal copies of parameters, buffers, optimizer; every generator seeded; gradients None
      ─▶ forward, backward ─▶ gradients, buffers, positions of the generators
      ─▶ optimizer, and more steps ─▶ parameters ─▶ output in eval mode

The baseline is run twice: a model that does not equal itself cannot be compared. A third run in float64 says how far
from exact the baseline itself is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from explorer.engine.diffs import Yardstick, differences, is_floating, same_bits
from explorer.engine.load import Loaded, call
from explorer.engine.rng import RngState, seed_everything
from explorer.engine.step import AUTOCAST, OnPhase, Trainee, forward_backward, ignore, prepare, run_step
from explorer.record.comparison import RngDiff, TensorDiff
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec

N_STEPS = 2
"""Optimizer steps behind the comparison of parameters: the second one starts from moved weights and statistics."""

EVAL_OUTPUT = "output in eval mode"


@dataclass
class Outcome:
    """What one run left behind: detached copies on the CPU, by full name."""

    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    rng: dict[str, bytes]
    loss: float
    n_steps: int = 0
    parameters: dict[str, Tensor | None] = field(default_factory=dict)
    eval_output: Tensor | None = None


def take(trainee: Trainee, *, full: bool = True, on_phase: OnPhase = ignore) -> Outcome:
    """Runs a fresh trainee, uses it up, and keeps what is left: after one backward, and in `full` after N_STEPS.

    What the model raises passes through.
    """
    loss = forward_backward(trainee, on_phase)
    on_phase("optimizer")
    outcome = Outcome(
        gradients={name: _copy(parameter.grad) for name, parameter in _trained(trainee.model)},
        buffers={name: _copy(buffer) for name, buffer in trainee.model.named_buffers()},
        rng=RngState.capture(trainee.model).positions(),
        loss=loss,
    )
    if full:
        _train_on(trainee, outcome)
        outcome.eval_output = eval_output(trainee)
    trainee.handle.undo()  # a policed model is a cycle: on a GPU it would lie beside the next one
    return outcome


def _train_on(trainee: Trainee, outcome: Outcome) -> None:
    if trainee.optimizer is None:
        return
    trainee.optimizer.step()
    for _ in range(N_STEPS - 1):
        run_step(trainee)
    outcome.n_steps = N_STEPS
    outcome.parameters = {name: _copy(parameter) for name, parameter in _trained(trainee.model)}


def eval_output(trainee: Trainee) -> Tensor | None:
    """Every floating tensor of the model's output in eval mode, in one row; None where the model has no such output
    (some models want other inputs in eval mode)."""
    trainee.model.eval()
    seed_everything(trainee.spec.seed)
    dtype = AUTOCAST.get(trainee.spec.autocast)
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # reentrant: "none of the inputs requires grad", which is meant
            torch.no_grad(),
            torch.autocast(trainee.device.type, dtype=dtype, enabled=dtype is not None),
        ):
            output = call(trainee.model, trainee.inputs)
    except Exception:  # detection models and the like: nothing to compare, and no fault of the policy
        return None
    leaves = tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output)  # transformers' ModelOutput
    tensors = [leaf.detach().flatten().cpu() for leaf in leaves if isinstance(leaf, Tensor) and is_floating(leaf)]
    return torch.cat(tensors) if tensors else None


def reference(spec: RunSpec, loaded: Loaded, baseline: Outcome) -> tuple[Outcome | None, str]:
    """The bare step in float64; or None, and why: the model cannot run in it, or went another way there.

    On the CPU dropout draws the same mask in every type; elsewhere, and for other random numbers, it does not: such a
    run is no reference, and is recognised by its distance from the baseline.
    """
    exact = msgspec.structs.replace(spec, dtype="float64", autocast="none", policy=KEEP_ALL, plan=None)
    try:
        outcome = take(prepare(exact, loaded))
    except Exception as error:  # a type written into the model, a kernel without float64: no reference, and no fault
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"The model does not run in float64: {type(error).__name__}: {first}"
    distance = _distance(baseline.gradients, outcome.gradients)
    if distance <= math.sqrt(coarsest_epsilon(spec)):
        return outcome, ""
    return None, (
        f"In float64 the gradients lie {distance:.1e} of their norm away from the baseline's: other random numbers, "
        "other branches, or a model too sensitive to judge rounding by."
    )


def coarsest_epsilon(spec: RunSpec) -> float:
    """Machine epsilon of the coarsest floating type that the run computes in."""
    types = [getattr(torch, spec.dtype), *([AUTOCAST[spec.autocast]] if spec.autocast != "none" else [])]
    return max(torch.finfo(dtype).eps for dtype in types)


def yardsticks(
    spec: RunSpec, rerun: Outcome | None, exact: Outcome | None
) -> tuple[Yardstick, Yardstick, Yardstick, Yardstick]:
    """For gradients, buffers, parameters and the eval output: each family has a scale of its own."""
    epsilon = coarsest_epsilon(spec)

    def of(family: str) -> Yardstick:
        sides = [getattr(outcome, family) if outcome else {} for outcome in (rerun, exact)]
        return Yardstick(rerun=sides[0], reference=sides[1], epsilon=epsilon)

    outputs = [{EVAL_OUTPUT: outcome.eval_output} if outcome else {} for outcome in (rerun, exact)]
    last = Yardstick(rerun=outputs[0], reference=outputs[1], epsilon=epsilon)
    return of("gradients"), of("buffers"), of("parameters"), last


def rng_differences(baseline: Outcome, candidate: Outcome) -> tuple[RngDiff, ...]:
    """Where every generator stands after one backward, those that both runs know (a late import may add numpy's)."""
    both = [name for name in baseline.rng if name in candidate.rng]
    return tuple(RngDiff(generator=name, equal=baseline.rng[name] == candidate.rng[name]) for name in both)


def not_reproducible_because(first: Outcome, second: Outcome) -> str:
    """Empty where two runs of one spec left the same bits behind; else which tensors did not, as one sentence."""
    families = [
        ("gradients", first.gradients, second.gradients),
        ("buffers", first.buffers, second.buffers),
        ("parameters", first.parameters, second.parameters),
    ]
    said = []
    for family, left, right in families:
        moved = [name for name in left if not _same(left[name], right.get(name))]
        if moved:
            said.append(f"{len(moved)} of {len(left)} {family} ({_some(moved)})")
    if not _same(first.eval_output, second.eval_output):
        said.append(f"the {EVAL_OUTPUT}")
    moved = [diff.generator for diff in rng_differences(first, second) if not diff.equal]
    if moved:
        said.append(f"the position of {_some(moved)}")
    if not said:
        return ""
    return f"Two runs of the baseline from the same state and seed differ in {', '.join(said)}."


def eval_difference(baseline: Outcome, candidate: Outcome, yardstick: Yardstick) -> TensorDiff | None:
    """None where neither run has an output in eval mode."""
    if baseline.eval_output is None and candidate.eval_output is None:
        return None
    sides = [{EVAL_OUTPUT: outcome.eval_output} for outcome in (baseline, candidate)]
    return differences(TensorDiff, sides[0], sides[1], yardstick)[0]


def _distance(baseline: dict[str, Tensor | None], exact: dict[str, Tensor | None]) -> float:
    """|baseline - exact| / |exact| over all gradients together; infinite where that is not a number."""
    pairs = [(left.double(), right) for name, left in baseline.items()
             if left is not None and (right := exact.get(name)) is not None]  # fmt: skip
    error = math.hypot(*(float((left - right).norm()) for left, right in pairs))
    scale = math.hypot(*(float(right.norm()) for _, right in pairs))
    distance = error / scale if scale else error
    return distance if math.isfinite(distance) else math.inf


def _trained(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _copy(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.to("cpu", copy=True)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else same_bits(left, right)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
