"""Checks that a model can be watched, copied and trained, with errors in plain sentences ahead of torch's errors."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from explorer.errors import BadInput, ModelFailed, ModelNotLoaded, said_by
from explorer.plan.names import listed


def refuse_unopenable(model: nn.Module, target: str) -> None:
    """Raises ModelNotLoaded for names that are not UTF-8, lazy parameters, and blocks compiled by torch.jit."""
    named = (
        name for names in (model.named_modules(), model.named_parameters(), model.named_buffers()) for name, _ in names
    )
    garbled = [ascii(name) for name in named if not _is_text(name)]
    if garbled:
        raise ModelNotLoaded(
            f"{target} has names that no file can hold: {listed(garbled)}. Half of a surrogate pair stands in them.",
            hint="Name blocks, parameters and buffers in letters that UTF-8 can write.",
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ModelNotLoaded(
            f"{target} has parameters without a shape: {listed(lazy)}. Lazy modules get theirs in the first forward.",
            hint="Run the example batch through the model once before the factory returns it.",
        )
    scripted = [
        fqn or "the model" for fqn, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)
    ]
    if scripted:
        raise ModelNotLoaded(
            f"{target} has blocks that torch.jit compiled: {listed(scripted)}. They cannot be watched or recomputed.",
            hint="Return the model as it is before torch.jit.script or torch.jit.trace.",
        )


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. Raises ModelFailed if a part of the model cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        old = [fqn for fqn, module in model.named_modules() if _has_old_norm(module)]
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


def _has_old_norm(module: nn.Module) -> bool:
    return any(type(hook).__name__ in ("WeightNorm", "SpectralNorm") for hook in module._forward_pre_hooks.values())


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
