"""Several models of one training as one: generator and discriminator, encoder and decoder, a loss with weights.

Instruments watch one module, so the models become children of a module that is never called. The child's name stands
in front of its blocks: `netG.main.3`. Nothing of the models changes.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType

from torch import nn
from torch.optim import Optimizer

from explorer.errors import BadInput

Models = nn.Module | Mapping[str, nn.Module]


class SeveralModels(nn.ModuleDict):
    """A module that is never called, with the models of a training by name."""


def one_model(models: Models) -> nn.Module:
    """`models`, or the module that holds them by name. Raises BadInput for anything else, and for names with a dot."""
    if isinstance(models, nn.Module):
        return models
    if not isinstance(models, Mapping) or not models or not all(isinstance(m, nn.Module) for m in models.values()):
        raise BadInput(
            f"A model was expected and {type(models).__name__} was given.",
            hint="Give the model first: a torch.nn.Module, or several by name, {'netG': netG, 'netD': netD}.",
        )
    try:
        return SeveralModels(OrderedDict(models))  # the names of a plain dictionary would be sorted
    except (KeyError, TypeError) as error:
        raise BadInput(
            f"A model cannot have that name: {error.args[0]}.", hint="Choose names without a dot."
        ) from error


def called_models(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that the loop calls: the model, or each of several."""
    return tuple(model.values()) if isinstance(model, SeveralModels) else (model,)


def models_of(optimizers: Iterable[Optimizer]) -> list[nn.Module]:
    """Outermost modules that hold the parameters of `optimizers`, the one with the most first; empty: none lives."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    modules = [
        thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and "_parameters" in vars(thing)
    ]
    parameters_of = [({id(parameter) for parameter in module.parameters()}, module) for module in modules]
    models: list[nn.Module] = []
    while trained:
        size = {
            id(module): (len(trained & parameters), sum(1 for _ in module.modules()))
            for parameters, module in parameters_of
        }
        parameters, model = max(parameters_of, key=lambda pair: size[id(pair[1])], default=(set(), None))
        if model is None or not trained & parameters:
            break
        models.append(model)
        trained -= parameters
    return models


def named_models(models: Sequence[nn.Module]) -> nn.Module | dict[str, nn.Module]:
    """One model as it is; several by the names of variables in the running code, else by their class."""
    if len(models) == 1:
        return models[0]
    named: dict[str, nn.Module] = {}
    for model in models:
        name = _variable_of(model) or type(model).__name__.lower()
        free = (f"{name}{number or ''}" for number in range(len(models) + 1))
        named[next(text for text in free if text not in named)] = model
    return named


def _variable_of(model: nn.Module) -> str:
    """Name of the variable that holds `model`, or of an attribute of `self`; empty if no running code has one.

    The outermost code has the name that its author reads; helpers call every model the same.
    """
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("explorer", "torch", "runpy"):
            variables = {**getattr(frame.f_locals.get("self"), "__dict__", {}), **frame.f_locals}
            variables.pop("self", None)
            name = next((variable for variable, value in variables.items() if value is model), name)
        frame = frame.f_back
    return name
