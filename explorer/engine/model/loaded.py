"""A model with its batch and loss: the call, the move to a device, the loss, and errors of the model in words.

Models that cannot be watched, copied or trained are refused in plain sentences ahead of torch's errors.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from explorer.engine.device.without_data import explained
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.state.snapshot import held_by
from explorer.errors import BadInput, ExplorerError, ModelFailed, ModelNotLoaded, said_by
from explorer.plan.names import listed
from explorer.record.failure import is_out_of_memory
from explorer.record.graph import ModelRef

POSITIONAL = "*"
"""Key of the positional arguments in a dict of inputs: no keyword argument can have this name."""

_SURROGATE = re.compile("[\ud800-\udfff]")
LossFunction = Callable[[object, object], Tensor]


@dataclass(frozen=True)
class OwnStep:
    """In place of inputs: a function that runs the model on the function's batch and returns the loss."""

    function: Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Loaded:
    """A model, a batch, and how to judge the output."""

    ref: ModelRef
    model: nn.Module
    inputs: object
    targets: object
    loss_function: LossFunction | None
    made: str = ""
    """How the batch was made, if the factory returned none: `made to fit with targets`."""
    left_behind: str = ""
    """A sentence about parts of the model that a copy lacks."""

    @property
    def batch_text(self) -> str:
        """Types and shapes of the batch, and how it was made; empty for a step with a batch of its own."""
        return "" if isinstance(self.inputs, OwnStep) else ", ".join(filter(None, (shapes(self.inputs), self.made)))

    @property
    def functions(self) -> tuple[object, ...]:
        """The loss function and a step of the model's own: they may hold weights too."""
        return self.loss_function, self.inputs.function if isinstance(self.inputs, OwnStep) else None

    def output(self) -> object:
        """The output for the whole batch."""
        return call(self.model, self.inputs)

    def loss(self, output: object, targets: object = None, *, trains: bool = True) -> Tensor:
        """A scalar, the mean over the batch. `targets` default to the targets of the whole batch.

        `trains` False: no backward follows, gradients may be off. Raises ModelFailed unless the loss has one number.
        """
        if self.loss_function is None:
            loss = default_loss(output)
        else:
            loss = self.loss_function(output, self.targets if targets is None else targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            returned = shapes(loss) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelFailed(
                f"The loss function of {self.ref.target} returned {returned}, not a tensor with one number.",
                hint="Let it return the mean over the batch.",
            )
        if trains and not loss.requires_grad and not torch.is_grad_enabled():
            raise ModelFailed(
                f"{self.ref.target} switched gradients off and left them off: its loss has none.",
                hint="Use `with torch.no_grad():` around the part that needs none, instead of torch.set_grad_enabled.",
            )
        return loss


def call(model: nn.Module, inputs: object) -> object:
    """model(x), model(*xs), model(**xs), or model(*xs["*"], **rest), by the form of `inputs`."""
    if isinstance(inputs, OwnStep):
        return inputs.function(model)
    if isinstance(inputs, dict):
        positional, named = inputs.get(POSITIONAL, ()), {k: v for k, v in inputs.items() if k != POSITIONAL}
        return model(*(positional if isinstance(positional, (tuple, list)) else (positional,)), **named)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def move_to(loaded: Loaded, device: torch.device | str, dtype: torch.dtype | None) -> Loaded:
    """Parameters, buffers and batch on `device`. Floating tensors become `dtype`, unless `dtype` is None.

    The model itself moves, and every module that its loss function or own step holds; changed tensors of the batch are
    new. Complex numbers stay complex, at the precision of `dtype` if `dtype` has a complex partner.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=cast_type(tensor.dtype, dtype))

    copies: dict[int, Tensor] = {}  # a tensor that is input and target stays one

    def moved(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or (leaf.device == torch.device(device) and dtype is None):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = cast(leaf.detach()).requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    for module in (loaded.model, *held_by(loaded.functions)):
        if not isinstance(module, nn.Module):
            continue
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.device != torch.device(device) for tensor in tensors):
            module.to(device)
        if any(tensor.dtype != cast_type(tensor.dtype, dtype) for tensor in tensors):
            module._apply(cast)  # .to(dtype) would cut complex parameters down to their real part
    return replace(loaded, inputs=tree_map(moved, loaded.inputs), targets=tree_map(moved, loaded.targets))


def types_of(model: nn.Module) -> str:
    """Types of the floating and complex parameters, the type with the most numbers first: `bfloat16, float32`."""
    numbers: Counter[str] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            numbers[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return ", ".join(name for name, _ in numbers.most_common())


def cast_type(original: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The type of a tensor of type `original` after a cast to `dtype`."""
    if dtype is None or not (original.is_floating_point or original.is_complex):
        return original
    complex_types = {torch.float32: torch.complex64, torch.float64: torch.complex128}
    return complex_types.get(dtype, original) if original.is_complex else dtype


@contextmanager
def blaming(ref: ModelRef, inputs: object, doing: str) -> Iterator[None]:
    """Turns the model's errors while `doing` ("forward", "backward") into ModelFailed that shows the batch."""
    try:
        with explained(ref.target):
            yield
    except ExplorerError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise ModelFailed(
            f"The {doing} of {ref.target} raised {said_by(error)} (inputs: {shapes(inputs)}).",
            hint=_hint(error, inputs),
        ) from error


REFUSES_HOOKS = "saved tensor hooks"
"""In torch's message where torch.func meets a checkpoint, or an instrument that looks at saved tensors."""
HOOKS_ARE_NEEDED = (
    "Torch refuses this transform beside saved-tensor hooks, which observing and checkpointing need. "
    "Use torch.autograd.grad(..., create_graph=True) there."
)


def said_at(error: BaseException, target: str) -> str:
    """What `error` says, with the last line of the target's file on the way to the error."""
    path, line = str(Path(target.partition(":")[0]).resolve()), 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        line = number if frame.f_code.co_filename == path else line
    return f"{said_by(error)}, at line {line} of {Path(path).name}" if line else said_by(error)


def _hint(error: BaseException, inputs: object) -> str:
    if REFUSES_HOOKS in str(error):
        return HOOKS_ARE_NEEDED
    if str(error).startswith("vmap:"):
        return "Torch refuses this operator inside torch.vmap, with or without an observer."
    hint = "Check that the batch fits the model."
    if isinstance(inputs, dict) and POSITIONAL not in inputs:
        hint += " A dict is passed as keyword arguments; a model that takes the dict itself gets it as (dict,)."
    return hint


def shapes(inputs: object) -> str:
    """Types and shapes of all tensors: `float32[8, 3, 32, 32], int64[8]`."""
    tensors = tensor_leaves(inputs)
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors) or "no tensor"


def default_loss(output: object) -> Tensor:
    """`output.loss` (or output["loss"]), the sum of a dict of losses, else the mean of squares of floating outputs.

    Raises ModelFailed if the output holds no floating tensor.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if losses := _losses(output):
        return torch.stack([loss.float() for loss in losses]).sum()
    floating = [leaf for leaf in _tensors(output) if leaf.is_floating_point()]
    if not floating:
        raise ModelFailed(
            f"The model returned {shapes(output)}: nothing to take a loss of.",
            hint="Let the factory return (model, (inputs, targets), loss_function).",
        )
    return torch.stack([tensor.float().square().mean() for tensor in floating]).mean()


def _losses(output: object) -> list[Tensor]:
    """Losses of a dict that holds only losses of one number each, as from detection models in training; else empty."""
    if not isinstance(output, dict) or not output or not all("loss" in str(name) for name in output):
        return []
    losses = [loss for loss in output.values() if isinstance(loss, Tensor) and loss.numel() == 1]
    return [loss.reshape(()) for loss in losses] if len(losses) == len(output) else []


def _tensors(output: object) -> list[Tensor]:
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    if dataclasses.is_dataclass(output) and not isinstance(output, type):  # torch's own trees know none
        return [leaf for part in dataclasses.fields(output) for leaf in _tensors(getattr(output, part.name))]
    return tensor_leaves(output)


def refuse_unopenable(model: nn.Module, target: str) -> None:
    """Raises ModelNotLoaded for names that are not UTF-8, lazy parameters, and blocks compiled by torch.jit."""
    named = (
        name for names in (model.named_modules(), model.named_parameters(), model.named_buffers()) for name, _ in names
    )
    garbled = [ascii(name) for name in named if _SURROGATE.search(name)]
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    scripted = [fqn or "the model" for fqn, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    for names, what, because, hint in (
        (garbled, "names that no file can hold", "Half of a surrogate pair stands in them.",
         "Name blocks, parameters and buffers in letters that UTF-8 can write."),
        (lazy, "parameters without a shape", "Lazy modules get theirs in the first forward.",
         "Run the example batch through the model once before the factory returns it."),
        (scripted, "blocks that torch.jit compiled", "They cannot be watched or recomputed.",
         "Return the model as it is before torch.jit.script or torch.jit.trace."),
    ):  # fmt: skip
        if names:
            raise ModelNotLoaded(f"{target} has {what}: {listed(names)}. {because}", hint=hint)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. Raises ModelFailed if a part of the model cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        hooks = [(fqn, hook) for fqn, module in model.named_modules() for hook in module._forward_pre_hooks.values()]
        old = [fqn for fqn, hook in hooks if type(hook).__name__ in ("WeightNorm", "SpectralNorm")]
        if old:
            raise ModelFailed(
                f"The model cannot be copied: torch.nn.utils.weight_norm keeps a computed weight in {listed(old)}.",
                hint="Use torch.nn.utils.parametrizations.weight_norm, which computes the same.",
            ) from error
        raise ModelFailed(
            f"The model cannot be copied: {said_by(error)}.",
            hint="Whatever modules hold as attributes has to survive copy.deepcopy.",
        ) from error


def refuse_sparse_under_adamw(model: nn.Module) -> None:
    """Raises BadInput for sparse embeddings: AdamW takes no sparse gradients."""
    sparse = [
        fqn
        for fqn, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    ]
    if sparse:
        raise BadInput(
            f"The gradient of {listed(sparse)} is sparse, which AdamW does not take.",
            hint="Choose the optimizer sgd, or build the embedding with sparse=False.",
        )
