"""LoRA adapters, and the parts of a model that levers freeze or adapt.

    y = x Wᵀ + b + (x Aᵀ) Bᵀ · alpha / rank        A: rank x in; B: out x rank, zero at first

The operators are those of peft without dropout, so a step holds the same tensors. `conditions.py` freezes blocks by
name; it also calls `add_adapters`. Source: https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from explorer.errors import BadInput
from explorer.plan.levers import Parts
from explorer.plan.names import some
from explorer.record.graph import Lora

ALPHA = 8
"""`lora_alpha`, at peft's default."""


class _Adapted(nn.Module):
    """Mixed into the class of a layer: the names of the layer's own parameters stay."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + F.linear(F.linear(x, self.lora_a), self.lora_b) * (ALPHA / len(self.lora_a))


@functools.cache
def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Lora{kind.__name__}", (_Adapted, kind), {})


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freezes `model` in place and adds an adapter to each Linear that `lora` targets, in the type of its weight.

    Adapters that are there stay. Raises BadInput if no Linear is targeted.
    """
    linears = {fqn: layer for fqn, layer in model.named_modules() if _is_linear(layer)}
    targets = [layer for fqn, layer in linears.items() if re.fullmatch(lora.targets, fqn)]
    if not targets:
        raise BadInput(
            f"Adapters are put beside Linear layers, and {lora.targets!r} matches none of this model.",
            hint=f"Its Linear layers are {some(list(linears))}." if linears else "The model has no Linear layer.",
        )
    model.requires_grad_(False)
    for layer in targets:
        if not isinstance(layer, _Adapted):
            _adapt(layer, lora.rank)
        layer.lora_a.requires_grad_(True)
        layer.lora_b.requires_grad_(True)
    if lora.quantize != "none":
        _quantize(model)


def _quantize(model: nn.Module) -> None:
    """Holds the weight of each Linear but the last layer's in four bits."""
    from explorer.engine.model.four_bit import FourBit, hold_in_four_bits  # its operators are registered late

    last = dict(model.named_modules())[last_layer(model)]
    tied = id(getattr(last, "weight", None))
    for layer in filter(_is_linear, model.modules()):
        if layer is last or id(layer.weight) == tied or isinstance(layer, FourBit):
            continue
        is_adapted, kind = isinstance(layer, _Adapted), type(layer)
        if is_adapted:
            layer.__class__ = kind.__bases__[-1]  # type: ignore[assignment]
        hold_in_four_bits(layer)
        if is_adapted:
            layer.__class__ = _adapted(type(layer))  # type: ignore[assignment, arg-type]


def _adapt(layer: nn.Module, rank: int) -> None:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    n_out, n_in = weight.shape if isinstance(layer, nn.Linear) else weight.shape[::-1]
    layer.__class__ = _adapted(type(layer))  # type: ignore[arg-type]
    layer.lora_a = nn.Parameter(weight.new_empty(rank, n_in))
    layer.lora_b = nn.Parameter(weight.new_zeros(n_out, rank))
    nn.init.kaiming_uniform_(layer.lora_a, a=5**0.5)


def _is_linear(layer: nn.Module) -> bool:
    """Whether the forward of `layer` is a product with its weight; subclasses of Linear may do without their forward.

    The Conv1D of transformers is a Linear with a transposed weight.
    """
    kind = type(layer)
    return isinstance(layer, _Adapted) or kind is nn.Linear or kind.__module__ == "transformers.pytorch_utils"


def parts_of(model: nn.Module, *, has_attention: bool) -> Parts:
    """What levers freeze and adapt of `model`."""
    layers, last = dict(model.named_modules()), last_layer(model)
    trained = set(map(id, layers[last].parameters()))  # a tied weight stays trained under its other name
    linears = [fqn for fqn, layer in layers.items() if fqn != last and _is_linear(layer)]
    frozen, blocks = tuple(_without(trained, model, "")), tuple(_called(model, ""))
    return Parts(has_attention, frozen, _pattern(linears, last), blocks=blocks)


def _called(module: nn.Module, prefix: str) -> Iterator[str]:
    """The outermost modules below `module` that are no mere containers."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def last_layer(model: nn.Module) -> str:
    """fqn of the module whose parameters are registered last."""
    owners = [fqn for fqn, layer in model.named_modules() if next(layer.parameters(recurse=False), None) is not None]
    return owners[-1]


def _without(trained: set[int], module: nn.Module, prefix: str) -> Iterator[str]:
    """Blocks and parameters that together hold every parameter of `module` but those whose ids are in `trained`."""
    yield from (prefix + name for name, each in module.named_parameters(recurse=False) if id(each) not in trained)
    for name, child in module.named_children():
        ids = set(map(id, child.parameters()))
        if ids & trained:
            yield from _without(trained, child, f"{prefix}{name}.")
        elif ids:
            yield prefix + name


def _pattern(names: list[str], last: str) -> str:
    """A regular expression of `names`: a number in a name means all numbers, unless that would match `last`."""
    shapes = [r"\.".join(r"\d+" if part.isdigit() else part for part in name.split(".")) for name in names]
    pairs = zip(names, shapes)
    return "|".join(dict.fromkeys(re.escape(name) if re.fullmatch(shape, last) else shape for name, shape in pairs))
