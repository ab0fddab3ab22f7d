"""One training step of one model under one policy: instruments watch the step, comparisons repeat it.

    zero_grad ─▶ forward │ backward │ forward │ backward │ … │ optimizer
                 one pair a microbatch of `n_accumulation`    once

A forward-only run, as in inference, has neither backward nor optimizer nor gradients.
`on_phase` is called at each border (│); no other code of the step depends on observers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from explorer.engine.model.conditions import autocast_of, under_conditions
from explorer.engine.model.equal_models import separate_copy
from explorer.engine.model.loaded import Loaded, call, refuse_sparse_under_adamw
from explorer.engine.policy.apply import PolicyHandle, apply_policy
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.state.rng import seed_everything
from explorer.errors import BadInput, NotOnThisDevice
from explorer.record.allocations import Phase
from explorer.record.policy import Policy
from explorer.record.run import RunSpec

OnPhase = Callable[[Phase], None]
SplitModel = Callable[[nn.Module], nn.Module]


def ignore(phase: Phase) -> None:
    """An OnPhase that does nothing."""


@dataclass
class Trainee:
    """A model that is ready to take steps. `optimizer` is None for backward only."""

    spec: RunSpec
    device: torch.device
    model: nn.Module
    inputs: object
    targets: object
    loss_function: Callable[[object, object], torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    handle: PolicyHandle
    whole: nn.Module | None = None
    """The module to call: DistributedDataParallel around `model`. None: `model` itself."""
    left_behind: str = ""
    """Why the trainee's model differs from the given model; empty if the two are equal."""
    batch_text: str = ""
    """The batch in words."""
    functions: Sequence[object] = ()
    """Functions that may hold weights of their own: a loss by a network that compares images."""
    output: object = None
    """What the model returned last, until the step is over; None if the spec does not hold it."""

    def microbatches(self) -> Iterator[tuple[object, object]]:
        """(inputs, targets) of each microbatch: views of the batch, split along dimension 0."""
        yield from split(self.inputs, self.targets, self.spec.n_accumulation)


def prepare(spec: RunSpec, loaded: Loaded | None = None) -> Trainee:
    """A trainee whose parameters, buffers, batch and generators depend on `spec` alone.

    If `loaded` is given, a copy of its model takes the steps, from its current state. The thread count and every
    generator are set; `state.global_state` restores both.
    Raises BadInput (unknown frozen fqn, indivisible batch), NotOnThisDevice, and what load and apply_policy raise.
    """
    from explorer.engine.model.load import load_for  # a step of the user's own script loads nothing

    return trainee_of(spec, separate_copy(loaded, seed=spec.seed) if loaded else load_for(spec))


def trainee_of(spec: RunSpec, loaded: Loaded, split_model: SplitModel | None = None) -> Trainee:
    """As `prepare`, with the model of `loaded` itself instead of a copy.

    `split_model` splits the model over ranks, after the policy, and returns the module to call.
    """
    device = torch_device(spec)
    torch.set_num_threads(spec.n_threads)
    loaded = under_conditions(loaded, spec.conditions, device)
    model = loaded.model
    split(loaded.inputs, loaded.targets, spec.n_accumulation)
    if spec.forward_only and spec.policy.units:
        raise BadInput(
            f"The run is forward alone and recomputes {len(spec.policy.units)} units: nothing runs again there.",
            hint="Leave the policy out, or measure a whole step.",
        )
    handle = apply_policy(model, spec.policy)
    whole = split_model(model) if split_model is not None else None
    optimizer = None if spec.forward_only else build_optimizer(model, spec)
    seed_everything(spec.seed)

    def loss(output: object, targets: object) -> torch.Tensor:
        return loaded.loss(output, targets=targets, trains=not spec.forward_only)

    return Trainee(
        spec, device, model, loaded.inputs, loaded.targets, loss, optimizer, handle, whole, loaded.left_behind,
        loaded.batch_text, loaded.functions,
    )  # fmt: skip


def run_step(trainee: Trainee, on_phase: OnPhase = ignore) -> float:
    """Runs one whole step and returns the loss (mean over the batch). Errors of the model pass through unchanged."""
    return sum(loss.item() for loss in step_without_loss(trainee, on_phase))


def forward_backward(trainee: Trainee, on_phase: OnPhase = ignore) -> float:
    """Runs the step without its optimizer. Gradients start as None and are summed over the microbatches."""
    losses = accumulate_gradients(trainee, on_phase)
    trainee.output = None
    return sum(loss.item() for loss in losses)


def accumulate_gradients(trainee: Trainee, on_phase: OnPhase) -> list[torch.Tensor]:
    """Runs forward and backward of each microbatch and returns the losses.

    The losses stay on the device: reading a loss would make the host wait in the step.
    """
    trainee.model.zero_grad(set_to_none=True)
    n_microbatches = trainee.spec.n_accumulation
    losses = []
    with host_of(trainee.spec.policy):
        for inputs, targets in trainee.microbatches():
            on_phase("forward")
            loss = _loss(trainee, inputs, targets)
            if n_microbatches > 1:
                loss = loss / n_microbatches
            losses.append(loss.detach())
            if not trainee.spec.forward_only:
                on_phase("backward")
                loss.backward()
            del loss
    return losses


def host_of(policy: Policy) -> AbstractContextManager[None]:
    """On the CPU, memory that the offloaded units of `policy` move their tensors to."""
    if all(unit.action != "offload" for unit in policy.units):
        return nullcontext()
    from explorer.engine.bench.host_stand_in import host_stand_in  # few steps need it

    return host_stand_in()


def forwards(trainee: Trainee, on_phase: OnPhase) -> None:
    """Runs the forwards of a step, with what their backwards would need. It is freed in the phase `between`."""
    for inputs, targets in trainee.microbatches():
        on_phase("forward")
        loss = _loss(trainee, inputs, targets)
        on_phase("between")
        del loss


def optimizer_step(trainee: Trainee, on_phase: OnPhase) -> None:
    """Runs the optimizer, if the trainee has one, and ends the step."""
    if trainee.optimizer is not None:
        on_phase("optimizer")
        trainee.optimizer.step()
    trainee.output = None


def step_without_loss(trainee: Trainee, on_phase: OnPhase) -> list[torch.Tensor]:
    """The step of the trainee's spec. Losses are returned unread: without data they have no value."""
    losses = accumulate_gradients(trainee, on_phase)
    optimizer_step(trainee, on_phase)
    return losses


def step_with_optimizer(target: str) -> Callable[[Trainee, OnPhase], object]:
    """The usual step with the optimizer that `target` (`file.py:Class`) makes of the parameters in the first step."""
    from explorer.engine.model.load import function_of

    make: Callable[..., Any] = function_of(target)

    def step(trainee: Trainee, on_phase: OnPhase) -> list[torch.Tensor]:
        if trainee.optimizer is None:
            trainee.optimizer = make(trainee.model.parameters())
        return step_without_loss(trainee, on_phase)

    return step


def _loss(trainee: Trainee, inputs: object, targets: object) -> torch.Tensor:
    """The loss. Unless the spec holds the output, backward starts with nothing but what autograd keeps."""
    with autocast(trainee), torch.no_grad() if trainee.spec.forward_only else nullcontext():
        output = call(trainee.whole or trainee.model, inputs)
        if trainee.spec.output_is_held:
            trainee.output = output
        return trainee.loss_function(output, targets)


def autocast(trainee: Trainee) -> torch.autocast:
    """The context around forward and loss: casts as the trainee's spec asks, or not at all."""
    return autocast_of(trainee.spec.conditions, trainee.device.type)


def refuse_other_settings(baseline: RunSpec, candidate: RunSpec) -> None:
    """Raises BadInput if the runs differ in more than policy and plan."""
    differing = [
        f"{name}: {getattr(baseline, name)!r} and {getattr(candidate, name)!r}"
        for name in RunSpec.__struct_fields__
        if name not in ("policy", "plan") and getattr(baseline, name) != getattr(candidate, name)
    ]
    if differing:
        raise BadInput(
            f"Baseline and candidate differ in more than their policy ({'; '.join(differing)}).",
            hint="Only runs of one model, batch, device and seed can be compared.",
        )


def segment_heads(policy: Policy) -> list[str]:
    """The first block of each segment: units of several blocks are watched there (watch/scopes.py)."""
    return [unit.blocks[0] for unit in policy.units if len(unit.blocks) > 1]


def torch_device(spec: RunSpec) -> torch.device:
    """The device of `spec`. Raises NotOnThisDevice if this machine or this torch lacks the device."""
    if spec.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NotOnThisDevice(
            f"The run asks for cuda; torch {torch.__version__} finds no CUDA device here.",
            hint="Choose the device cpu, or run it on a machine with a GPU and open the run file here.",
        )
    return torch.device("cuda", torch.cuda.current_device())


def build_optimizer(model: nn.Module, spec: RunSpec) -> torch.optim.Optimizer | None:
    """torch's AdamW or SGD in the form of the spec, or AdamW in 8 bits; None for backward only.

    By default a step for a card takes `foreach`, as torch does on CUDA: all parameters' temporaries are alive at once.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise BadInput(
            "The run trains nothing: no parameter of the model requires a gradient.",
            hint="Freeze fewer blocks." if spec.frozen else "Give the model trainable parameters.",
        )
    foreach, fused = _form(spec)
    if spec.optimizer == "adamw":
        refuse_sparse_under_adamw(model)
        return torch.optim.AdamW(parameters, lr=spec.learning_rate, foreach=foreach, fused=fused)
    if spec.optimizer == "adamw8bit":
        from explorer.engine.bench.adamw_8bit import AdamW8bit  # an operator is registered once, and late

        return AdamW8bit(parameters, spec.learning_rate)
    if spec.optimizer == "sgd":
        rate, momentum = spec.learning_rate, spec.momentum
        return torch.optim.SGD(parameters, lr=rate, momentum=momentum, foreach=foreach, fused=fused)
    return None


def _form(spec: RunSpec) -> tuple[bool | None, bool | None]:
    """torch's arguments `foreach` and `fused` for the form of `spec`; None leaves the choice to torch."""
    if spec.optimizer_form == "default":
        return (True if spec.card is not None else None), None
    return spec.optimizer_form == "foreach", spec.optimizer_form == "fused"


def split(inputs: object, targets: object, n_parts: int) -> list[tuple[object, object]]:
    """Equal parts of a batch, as views: tensors with the batch's dimension 0 are cut, other tensors stay whole.

    The first tensor of `inputs` sets the batch's dimension 0. Raises BadInput if `n_parts` does not divide it.
    """
    if n_parts == 1:
        return [(inputs, targets)]
    tensors = list(filter(torch.Tensor.dim, tensor_leaves(inputs)))
    n_samples = tensors[0].shape[0] if tensors else 0
    if n_parts < 1 or not n_samples or n_samples % n_parts:
        raise BadInput(
            f"A batch of {n_samples} samples cannot be split into {n_parts} equal microbatches.",
            hint="Choose a number of microbatches that divides the batch.",
        )
    size = n_samples // n_parts

    def part(i: int) -> Callable[[object], object]:
        def cut(leaf: object) -> object:
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == n_samples:
                return leaf.narrow(0, i * size, size)
            return leaf

        return cut

    return [(tree_map(part(i), inputs), tree_map(part(i), targets)) for i in range(n_parts)]
