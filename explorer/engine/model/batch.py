"""Conversion of a factory's result into a model with a batch and a loss. A factory may return:

model                                  the batch is made to fit
(model, inputs)
(model, (inputs, targets), loss)       loss(output, targets): the mean over the batch
(model, step)                          step(model) has its own batch and returns the loss

A batch that is made follows the model's settings:

timm        `pretrained_cfg["input_size"]`
diffusers   `config.sample_size`, `in_channels`, the widths of its conditions, and the names of forward's arguments
any other   the first layer that has a width: a convolution's channels, a Linear's features, an Embedding's rows

A batch is accepted if a copy of the model in eval mode takes the batch without an error. The model itself is not run.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.model.loaded import (
    POSITIONAL,
    Loaded,
    OwnStep,
    call,
    copied,
    default_loss,
    refuse_unopenable,
    said_at,
    shapes,
)
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.state.rng import RngState
from explorer.errors import ModelNotLoaded
from explorer.plan.names import listed
from explorer.record.failure import is_out_of_memory
from explorer.record.graph import ModelRef

_WAYS = "Return the model, (model, inputs), (model, (inputs, targets), loss_function) or (model, step)."
_SIDES = (64, 224, 28, 32, 96, 128, 256, 299, 512)
_TARGETS = ("targets", "target", "labels", "label", "y")
"""Names of optional arguments with which a forward usually returns its loss."""
_SWITCHES = ("return_loss", "compute_loss")
_MOST_ARGUMENTS = 6
"""Optional arguments that are tried: each attempt runs a copy of the model."""
_CONDITION_LENGTH = 77


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Numbers that shape the batch, if the factory has no such argument."""

    batch: int = 2
    length: int = 64
    side: int = 0
    """0: the model's setting."""


SHAPE_ARGUMENTS = tuple(field.name for field in dataclasses.fields(BatchShape))


def unpacked(ref: ModelRef, built: object, sizes: Mapping[str, int]) -> Loaded:
    """The model, batch and loss of `built`. `sizes` are those of SHAPE_ARGUMENTS that the factory does not take.

    Raises ModelNotLoaded, with the kind of `built`, for other results, and for `sizes` of a batch made elsewhere.
    """
    model, batch, loss = built, None, None
    if isinstance(built, (tuple, list)):
        model = None
        if 1 <= len(built) <= 3:
            model, batch, loss = (*built, None, None)[:3]
    if not isinstance(model, nn.Module):
        kind = f"{len(built)} things" if isinstance(built, (tuple, list)) else type(built).__name__
        raise ModelNotLoaded(f"The factory of {ref.target} returned {kind}, not a model.", hint=_WAYS)
    refuse_unopenable(model, ref.target)
    if batch is None:
        shape = BatchShape(**sizes)
        inputs = example_batch(model, ref.target, shape)
        if loss is None and (trained := with_targets(model, inputs)) is not None:
            return Loaded(ref, model, trained, None, returned_loss, made=made_text(model, trained))
        return Loaded(ref, model, inputs, None, loss, made=made_text(model, inputs))
    if sizes:
        raise ModelNotLoaded(
            f"{ref.target} makes its own batch, and its factory takes no argument {', '.join(sizes)}.",
            hint=f"Give the factory an argument such as {next(iter(sizes))}, and make the batch of that size.",
        )
    if loss is None:
        if callable(batch) and not isinstance(batch, torch.Tensor):
            return Loaded(ref, model, OwnStep(batch), None, _its_own)
        return Loaded(ref, model, batch, None, None)
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2) or not callable(loss):
        raise ModelNotLoaded(
            f"The factory of {ref.target} returned a loss function, but its batch is not a pair (inputs, targets).",
            hint="Return (model, (inputs, targets), loss_function) with loss_function(output, targets).",
        )
    return Loaded(ref, model, batch[0], batch[1], loss)


def _its_own(output: object, targets: object) -> Any:
    """The output itself: a step returns its loss."""
    return output


def example_batch(model: nn.Module, target: str, shape: BatchShape) -> object:
    """Inputs that the model takes. Raises ModelNotLoaded, with the last candidate's error, if no candidate works."""
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ModelNotLoaded(
            f"The factory of {target} built its model on the device meta, where parameters have no values.",
            hint="Build the model on the CPU; with --predict this takes no memory either.",
        )
    generators = RngState.capture(model)
    tried, last = "", ""
    for inputs in _candidates(model, shape):
        generators.restore()
        tried = shapes(inputs)
        try:
            probe = copied(model).eval()
            with torch.no_grad():
                call(probe, inputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            last = said_at(error, target)
        else:
            generators.restore()
            return inputs
    because = f": with {tried} it raised {last}" if tried else " to guess one from"
    raise ModelNotLoaded(
        f"{target} came without an example batch, and none was found{because}.",
        hint="Where that is about the batch, write a factory that returns (model, inputs), or give the shape: "
        "--set batch=2 --set side=224; else mend the installation or the model's arguments first.",
    )


def made_text(model: nn.Module, inputs: object) -> str:
    """That the batch was made, with the arguments that were filled, and those left out that training usually gives."""
    filled = [name for name in inputs if name != POSITIONAL] if isinstance(inputs, dict) else []
    optional = _arguments(model, None, keywords=True)
    usual = [name for name in optional if name in _TARGETS or ("mask" in name and not name.startswith("att"))]
    left_out = [name for name in usual if name not in filled and "encoder" not in name]
    text = "made to fit"
    if filled:
        text += f" with {listed(filled)}"
    if left_out:
        text += f" without {listed(left_out)}"
    return text


def with_targets(model: nn.Module, inputs: object) -> object:
    """`inputs` with values for the optional arguments of forward with which the model returns its loss.

    Without them such a model takes its inference path. None: no argument brings a loss.
    """
    named = inputs if isinstance(inputs, dict) else {POSITIONAL: (inputs,)}
    optional = [name for name in _arguments(model, None, keywords=True) if name not in named]
    optional = sorted(optional, key=lambda name: name not in _TARGETS)[:_MOST_ARGUMENTS]
    switches = [name for name in _arguments(model, False, keywords=True) if name in _SWITCHES]
    if not optional and not switches:
        return None
    generators = RngState.capture(model)
    try:
        probe = copied(model)
        output = _output_of(probe, inputs)
        if loss_in(output) is not None:  # that loss may be a part only, as of a router
            optional, switches = [name for name in optional if name in _TARGETS], []
        for choices in _fillings(optional, switches, inputs, output):
            for arguments in choices:
                filled = {**named, **arguments}
                output = _output_of(probe, filled)
                if loss_in(output) is not None:
                    return filled
                if output is not None:
                    break  # the argument fits and is no target
        return None
    finally:
        generators.restore()


def _output_of(probe: nn.Module, inputs: object) -> object:
    """What a throwaway copy returns: in train mode if only that brings a loss. None: it takes no such inputs."""
    output: object = None
    for trains in (False, True):
        with suppress(Exception), torch.no_grad():
            output = call(probe.train(trains), inputs)
            if loss_in(output) is not None:
                break
    return output


def _fillings(
    optional: list[str], switches: list[str], inputs: object, output: object
) -> Iterator[Iterator[Mapping[str, object]]]:
    """Of each optional argument, then of two together, the values to try; a switch is turned on."""
    first = tensor_leaves(inputs)[0]
    logits = next(filter(Tensor.is_floating_point, tensor_leaves(output)), None)
    masks = [name for name in optional if "mask" in name]
    targets = [name for name in optional if name not in masks]
    for name in switches:
        yield iter([{name: True}])
    for name in targets:
        yield ({name: value} for value in _targets(first, logits))
    for name in masks:
        yield ({name: value} for value in _masks(first, logits))
    if targets and masks:
        target, mask = targets[0], masks[0]
        yield ({target: value, mask: hides} for value in _targets(first, logits) for hides in _masks(first, logits))


def _targets(first: Tensor, logits: Tensor | None) -> Iterator[Tensor]:
    """Candidates: the words themselves, a class for each example, then a tensor like the output."""
    if not first.is_floating_point():
        yield first.clone()
    if logits is not None and logits.dim():
        yield torch.randint(0, logits.shape[-1], logits.shape[:1])
        yield torch.randn(logits.shape)


def _masks(first: Tensor, logits: Tensor | None) -> Iterator[Tensor]:
    """Candidates for a mask that covers every second place: of the tokens, of the input, of the output."""
    sizes = [first.shape[:2], first.shape, first.shape[:1] + first.shape[2:]]
    if logits is not None:
        sizes += [logits.shape[:2], logits.shape]
    for size in dict.fromkeys(sizes):
        half = torch.arange(size.numel()).reshape(size) % 2
        yield half.bool()
        yield half.float()


def loss_in(output: object) -> Tensor | None:
    """The loss that a model returns beside its output: named so, or the one tensor with one number."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    numbers = [leaf for leaf in tensor_leaves(output) if leaf.dim() == 0]
    if isinstance(loss, Tensor):
        return loss
    return numbers[0] if len(numbers) == 1 and numbers[0].is_floating_point() else None


def returned_loss(output: object, targets: object) -> Any:
    """The loss in the output of a model that was given its targets; else the usual loss, as in eval mode."""
    loss = loss_in(output)
    return default_loss(output) if loss is None else loss


def _candidates(model: nn.Module, shape: BatchShape) -> Iterator[object]:
    needed, optional = _arguments(model, inspect.Parameter.empty), _arguments(model, None)
    for first in _firsts(model, shape):
        named = _by_names(needed[1:], model, shape)
        if len(named) == len(needed[1:]):
            yield {"*": (first,), **named} if named else first
            if more := _by_names(optional, model, shape):  # forward may need an argument whose default is None
                yield {"*": (first,), **named, **more}


def _arguments(model: nn.Module, default: object, *, keywords: bool = False) -> list[str]:
    """Names of forward's positional arguments with the default `default`; with `keywords`, of those with names."""
    other = inspect.Parameter.KEYWORD_ONLY if keywords else inspect.Parameter.POSITIONAL_ONLY
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, other)
    parameters = inspect.signature(model.forward).parameters.values()
    return [each.name for each in parameters if each.default is default and each.kind in kinds]


def _by_names(names: Sequence[str], model: nn.Module, shape: BatchShape) -> dict[str, Tensor]:
    by_name = {name: _by_name(name, model, shape) for name in names}
    return {name: value for name, value in by_name.items() if value is not None}


def _firsts(model: nn.Module, shape: BatchShape) -> Iterator[Tensor]:
    """Candidates for the first argument, likeliest first."""
    pretrained = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(pretrained, dict) and pretrained.get("input_size") and not shape.side:
        yield torch.randn(shape.batch, *pretrained["input_size"])
    for module in model.modules():
        make = next((make for kind, make in _MADE.items() if isinstance(module, kind)), None)
        if make is not None:
            channels = _setting(model, "in_channels")  # the first layer may take more, as for time
            for side in _sides(model, shape):
                made = make(module, shape, side)
                yield made
                if isinstance(channels, int) and channels < getattr(module, "in_channels", 0):
                    yield made[:, :channels].clone()
            return


def _sides(model: nn.Module, shape: BatchShape) -> tuple[int, ...]:
    if shape.side:
        return (shape.side,)
    side = _setting(model, "sample_size", "image_size", "img_size")
    side = side[0] if isinstance(side, (tuple, list)) else side
    return (side, *_SIDES) if isinstance(side, int) else _SIDES


def _setting(model: nn.Module, *names: str) -> object:
    """The first attribute of `names` that the model or its configuration has."""
    holders = (getattr(model, "config", None), model)
    return next((value for holder in holders for name in names if (value := getattr(holder, name, None))), None)


def _by_name(name: str, model: nn.Module, shape: BatchShape) -> Tensor | None:
    """A tensor for an argument with a well-known name; None: unknown."""
    width = _setting(model, "cross_attention_dim", "joint_attention_dim")
    pooled = _setting(model, "pooled_projection_dim")
    classes = _setting(model, "num_embeds_ada_norm", "num_class_embeds")
    if name in ("timestep", "timesteps", "t", "time"):
        return torch.randint(0, 1000, (shape.batch,))
    if name in ("encoder_hidden_states", "context") and isinstance(width, int):
        return torch.randn(shape.batch, _CONDITION_LENGTH, width)
    if name == "pooled_projections" and isinstance(pooled, int):
        return torch.randn(shape.batch, pooled)
    if name == "class_labels" and isinstance(classes, int):
        return torch.randint(0, classes, (shape.batch,))
    return None


_MADE: dict[type[nn.Module], Callable[[Any, BatchShape, int], Tensor]] = {
    nn.Conv1d: lambda module, shape, side: torch.randn(shape.batch, module.in_channels, max(shape.length, side)),
    nn.Conv2d: lambda module, shape, side: torch.randn(shape.batch, module.in_channels, side, side),
    nn.Conv3d: lambda module, shape, side: torch.randn(shape.batch, module.in_channels, 16, side, side),
    nn.Embedding: lambda module, shape, side: torch.randint(0, module.num_embeddings, (shape.batch, shape.length)),
    nn.Linear: lambda module, shape, side: torch.randn(shape.batch, module.in_features),
    nn.RNNBase: lambda module, shape, side: torch.randn(shape.batch, shape.length, module.input_size),
    nn.TransformerEncoderLayer: lambda module, shape, side: torch.randn(
        shape.batch, shape.length, module.norm1.normalized_shape[0]
    ),
}
