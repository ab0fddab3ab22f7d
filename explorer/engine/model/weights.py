"""Weights from a file that cannot run code: safetensors, or torch.load with weights_only."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from explorer.errors import BadInput, ModelNotLoaded, said_by
from explorer.plan.names import listed

_INSIDE = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts store the weights in a checkpoint."""


def load_weights(model: nn.Module, path: str, target: str) -> None:
    """Loads all weights in place. Raises BadInput for a file without weights, ModelNotLoaded for another model's."""
    weights = _read(Path(path))
    own = model.state_dict()
    missing = [name for name in own if name not in weights]
    strangers = [name for name in weights if name not in own]
    other = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    faults = [
        f"{word} {listed(names)}" for word, names in
        (("it lacks", missing), ("the model has no", strangers), ("of another shape are", other)) if names
    ]  # fmt: skip
    if faults:
        raise ModelNotLoaded(
            f"The weights in {path} are not those of {target}: {'; '.join(faults)}.",
            hint="Give the arguments with which the saved model was built, or leave the weights out.",
        )
    model.load_state_dict(weights)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise BadInput(f"There is no file {path} to read weights from.", hint="Give a .safetensors or .pt file.")
    try:
        if path.suffix == ".safetensors":
            read: Any = importlib.import_module("safetensors.torch").load_file(path)
        else:
            read = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise BadInput(f"{path} needs the library safetensors.", hint="pip install safetensors") from error
    except Exception as error:
        raise BadInput(
            f"{path} cannot be read as weights: {said_by(error)}.",
            hint="Save model.state_dict() alone: a file that would run code is never loaded.",
        ) from error
    inside = next((read[name] for name in _INSIDE if isinstance(read, dict) and isinstance(read.get(name), dict)), read)
    if not isinstance(inside, dict) or not all(isinstance(value, Tensor) for value in inside.values()):
        raise BadInput(f"{path} holds no state_dict.", hint="Save model.state_dict().")
    return inside
