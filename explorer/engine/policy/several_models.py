"""Several models of one training as one: generator and discriminator, encoder and decoder, a loss with weights.

Instruments watch one module, so the models become children of a module that is never called. The child's name stands
in front of its blocks: `netG.main.3`. Nothing of the models changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

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
