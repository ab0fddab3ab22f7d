"""The outcome of a step: everything that two runs are compared in, bit by bit.

    equal copies of parameters, buffers, optimizer; every generator seeded; gradients None
      ─▶ forward, backward ─▶ gradients, buffers, positions of the generators
      ─▶ optimizer, and more steps ─▶ parameters ─▶ output in eval mode

The baseline runs twice: a model that does not reproduce its own results cannot be compared. A third run in float64
gives the distance of the baseline from exact.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from explorer.engine.bench.step import OnPhase, Trainee, autocast, forward_backward, ignore
from explorer.engine.compare.diffs import Yardstick, differences, is_floating, step_distances
from explorer.engine.compare.kept import Kept, as_bytes, on_cpu
from explorer.engine.model.loaded import call
from explorer.engine.state.bits import same_bits
from explorer.engine.state.rng import RngState, seed_everything
from explorer.engine.state.state_diff import State, plain_copy, read_state
from explorer.record.comparison import GradientDiff, ParameterDiff, RngDiff, TensorDiff

N_STEPS = 2
"""Optimizer steps before parameters are compared: the second step starts from moved weights and statistics."""

EVAL_OUTPUT = "output in eval mode"

Tensors = Mapping[str, Tensor | None]


@dataclass
class Outcome:
    """Results of one run, by full name."""

    gradients: Tensors
    input_gradients: Tensors
    buffers: Tensors
    rng: dict[str, bytes]
    loss: float
    states: list[State] = field(default_factory=list)
    """State of the model after the first step's backward and after the last step."""
    moved: Tensors = field(default_factory=dict)
    """Parameters that forward or backward moved, before any optimizer."""
    trained: frozenset[str] = frozenset()
    """Names of the parameters that require a gradient."""
    n_steps: int = 0
    stepped: bool = True
    """Whether an optimizer of torch stepped."""
    led: bool = False
    """Whether the optimizers of this run got the gradients of the run `lead`."""
    later_gradients: Tensors = field(default_factory=dict)
    after: list[Tensors] = field(default_factory=list)
    """All parameters after each step; of a run with a `lead`, after the last step only."""
    eval_output: Tensor | None = None

    @property
    def parameters(self) -> Tensors:
        """After the last step."""
        return self.after[-1] if self.after else {}


def take(
    trainee: Trainee,
    *,
    full: bool = True,
    on_phase: OnPhase = ignore,
    lead: Outcome | None = None,
    like: Outcome | None = None,
) -> Outcome:
    """Outcome of a fresh trainee after one backward, and if `full` after N_STEPS. The trainee cannot be used again.

    If the gradients differ from those of `lead`, each further step starts from the parameters of `lead`. AdamW makes a
    whole step of a gradient that is zero but for rounding, which would spoil the comparison of all later steps.
    `like` is an outcome that is probably equal: equal tensors share its place on disk, but it leads no step.
    Errors of the model pass through.
    """
    model, known = trainee.model, lead or like or _NOTHING
    start = {name: fingerprint(parameter) for name, parameter in model.named_parameters()}
    loss = forward_backward(trainee, on_phase)
    on_phase("optimizer")
    outcome = Outcome(
        gradients=Kept(_gradients(model), known.gradients),
        input_gradients=Kept(input_gradients(trainee), known.input_gradients),
        buffers=Kept(model.named_buffers(), known.buffers),
        rng=RngState.capture(model).positions(),
        loss=loss,
        states=[_remembered(trainee)],
        moved=Kept((name, parameter) for name, parameter in model.named_parameters()
                   if start.get(name) != fingerprint(parameter)),
        trained=frozenset(name for name, _ in _trained(model)),
    )  # fmt: skip
    if full:
        _train_on(trainee, outcome, lead, known)
        outcome.eval_output = eval_output(trainee)
    trainee.handle.undo()  # a wrapped model is a cycle: its GPU memory would stay during the next run
    return outcome


def _train_on(trainee: Trainee, outcome: Outcome, lead: Outcome | None, known: Outcome) -> None:
    """Runs the further steps. Without an optimizer a step is forward and backward alone, which still moves state."""
    parted = lead is not None and not same_gradients(lead, outcome)
    for i in range(N_STEPS):
        if i:
            forward_backward(trainee)
            outcome.later_gradients = Kept(_gradients(trainee.model), known.later_gradients)
        if trainee.optimizer is not None:
            trainee.optimizer.step()
        if lead is None or i == N_STEPS - 1:
            outcome.after.append(Kept(trainee.model.named_parameters(), known.after[i] if known.after else None))
        if lead is not None and parted:
            _follow(trainee.model, lead.after[i])
    outcome.n_steps = N_STEPS
    outcome.states.append(_remembered(trainee))


def _follow(model: nn.Module, parameters: Tensors) -> None:
    with torch.no_grad():
        for name, parameter in _trained(model):
            known = parameters.get(name)
            if known is not None:
                parameter.copy_(known)


def eval_output(trainee: Trainee) -> Tensor | None:
    """Floating tensors of the model's output in eval mode, as one flat tensor. None if the output has no such tensor or
    the model fails (some models take other inputs in eval mode)."""
    seed_everything(trainee.spec.seed)
    try:
        trainee.model.eval()
        with (
            warnings.catch_warnings(action="ignore"),  # reentrant: "none of the inputs requires grad", which is meant
            torch.no_grad(),
            autocast(trainee),
        ):
            output = call(trainee.model, trainee.inputs)
    except Exception:  # detection models and the like: nothing to compare, and not the policy's fault
        return None
    leaves = tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output)  # transformers' ModelOutput
    tensors = [leaf.detach().flatten().cpu() for leaf in leaves if isinstance(leaf, Tensor) and is_floating(leaf)]
    return torch.cat(tensors) if tensors else None


_NOTHING = Outcome(gradients={}, input_gradients={}, buffers={}, rng={}, loss=0.0)


@dataclass(frozen=True)
class Yardsticks:
    """The scales of differences: the baseline's rerun, and the same steps in float64."""

    epsilon: float
    rerun: Outcome | None
    exact: Outcome | None

    def of(self, family: str) -> Yardstick:
        """The yardstick of one field of Outcome: each family has its own scale."""
        return self.yardstick(*(getattr(outcome, family) if outcome else {} for outcome in (self.rerun, self.exact)))

    def yardstick(self, rerun: Tensors, reference: Tensors) -> Yardstick:
        """The yardstick of any tensors of the rerun and the reference."""
        return Yardstick(rerun=rerun, reference=reference, epsilon=self.epsilon)


def rng_differences(baseline: Outcome, candidate: Outcome) -> tuple[RngDiff, ...]:
    """Differences of the generators after one backward. Generators of one run alone (a late import) are left out."""
    both = [name for name in baseline.rng if name in candidate.rng]
    return tuple(RngDiff(generator=name, equal=baseline.rng[name] == candidate.rng[name]) for name in both)


def not_reproducible_because(first: Outcome, second: Outcome) -> str:
    """One sentence with the tensors in which two runs of one spec differ; empty if all bits are equal."""
    families = [
        ("gradients", first.gradients, second.gradients),
        ("gradients of the inputs", first.input_gradients, second.input_gradients),
        ("gradients of the last step", first.later_gradients, second.later_gradients),
        ("buffers", first.buffers, second.buffers),
        ("parameters", first.parameters, second.parameters),
    ]
    differing = []
    for family, left, right in families:
        moved = [name for name in left if not _same(left[name], right.get(name))]
        if moved:
            differing.append(f"{len(moved)} of {len(left)} {family} ({_some(moved)})")
    if not _same(first.eval_output, second.eval_output):
        differing.append(f"the {EVAL_OUTPUT}")
    moved = [diff.generator for diff in rng_differences(first, second) if not diff.equal]
    if moved:
        differing.append(f"the position of {_some(moved)}")
    if not differing:
        return ""
    return f"Two runs of the baseline from the same state and seed differ in {', '.join(differing)}."


def eval_difference(baseline: Outcome, candidate: Outcome, yardsticks: Yardsticks) -> TensorDiff | None:
    """The difference of the outputs in eval mode; None if neither run has such an output."""
    if baseline.eval_output is None and candidate.eval_output is None:
        return None
    runs = (baseline, candidate, yardsticks.rerun, yardsticks.exact)
    sides = [{EVAL_OUTPUT: outcome.eval_output} if outcome else {} for outcome in runs]
    return differences(TensorDiff, sides[0], sides[1], yardsticks.yardstick(sides[2], sides[3]))[0]


def parameter_differences(
    baseline: Outcome, candidate: Outcome, yardsticks: Yardsticks, gradients: Iterable[GradientDiff]
) -> tuple[ParameterDiff, ...]:
    """Differences of all parameters after the last step; `gradients` of every step show which differences are rounding.

    If the optimizers of both runs got equal gradients, the yardstick is the step alone: only the step rounds.
    """
    rounding = {name: True for name in baseline.trained}
    equal = set(baseline.trained) if candidate.led else {diff.name for diff in gradients}
    for diff in gradients:
        rounding[diff.name] = rounding.get(diff.name, True) and diff.verdict in ("bitwise equal", "rounding")
        if not diff.bitwise and not candidate.led:
            equal.discard(diff.name)
    before = baseline.after[-2] if len(baseline.after) > 1 else {}
    alone = {name: before[name] for name in equal if name in before and name not in baseline.moved}
    yardstick = replace(yardsticks.of("parameters"), before=alone)
    diffs = differences(ParameterDiff, baseline.parameters, candidate.parameters, yardstick)
    return tuple(
        msgspec.structs.replace(
            diff,
            trained=diff.name in baseline.trained,
            gradients_round=rounding.get(diff.name, False) and diff.name not in baseline.moved,
            **_step(diff, baseline, candidate, before.get(diff.name)),
        )
        for diff in diffs
    )


def _step(diff: ParameterDiff, baseline: Outcome, candidate: Outcome, before: Tensor | None) -> dict[str, float | None]:
    if diff.bitwise or diff.max_abs is None or before is None or not is_floating(before):
        return {}
    one, other = baseline.parameters[diff.name], candidate.parameters[diff.name]
    return step_distances(one, other, before) if one is not None and other is not None else {}


def _trained(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _gradients(model: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
    return ((name, parameter.grad) for name, parameter in _trained(model))


def _remembered(trainee: Trainee) -> State:
    """State of the model and of the batch, because a model may write into the batch."""
    return {
        **read_state(trainee.model, whole=True),
        ("", "batch", "attribute"): plain_copy([trainee.inputs, trainee.targets]),
    }


def input_gradients(trainee: Trainee) -> Iterable[tuple[str, Tensor | None]]:
    """Gradients of the leaves of the batch that require one, by path in the batch."""
    for what, batch in (("inputs", trainee.inputs), ("targets", trainee.targets)):
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad:
                yield what + keystr(path), leaf.grad


def fingerprint(tensor: Tensor) -> bytes:
    """Hash of a tensor's bytes, 32 bytes long."""
    dense = on_cpu(tensor)
    assert dense is not None
    return hashlib.blake2b(as_bytes(dense), digest_size=32).digest()


def same_gradients(one: Outcome, other: Outcome) -> bool:
    """Whether all gradients of the first backward are equal in every bit."""
    return all(_same(one.gradients.get(name), gradient) for name, gradient in other.gradients.items())


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else same_bits(left, right)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
