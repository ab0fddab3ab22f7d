"""The loss over chunks of the batch: logits of one chunk at a time, made again in backward.

    model ─▶ input of the last layer ─┬─ chunk ─▶ last layer ─▶ loss ─┐
                                      ├─ chunk ─▶ last layer ─▶ loss ─┼─▶ mean
                                      └─ …        └─── checkpoint ────┘

It can be played where the model returns the output of its last layer, and the loss function is not in the model. A
policy cannot say it: the loss is code outside of all modules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from explorer.engine.model.adapters import last_layer
from explorer.engine.model.loaded import Loaded, default_loss
from explorer.engine.watch.lines import line_of_model

N_CHUNKS = 8


class _Deferred(nn.Module):
    """Mixed into the class of the last layer, whose call then returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def logits(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y


@cache
def _deferred(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Deferred{kind.__name__}", (_Deferred, kind), {})


def in_chunks(loaded: Loaded, layer: str) -> Loaded:
    """`loaded`, whose model returns the input of `layer`, and whose loss runs `layer` on chunks of it."""
    last = loaded.model.get_submodule(layer)
    if not isinstance(last, _Deferred):
        last.__class__ = _deferred(type(last))  # type: ignore[arg-type]
    assert isinstance(last, _Deferred)
    return replace(loaded, loss_function=partial(_mean_over_chunks, last, loaded.loss_function or _without_targets))


def _without_targets(output: object, targets: object) -> Tensor:
    return default_loss(output)


def _mean_over_chunks(
    last: _Deferred, loss_of: Callable[[object, object], Tensor], hidden: Tensor, targets: object
) -> Tensor:
    def loss(rows: Tensor, part: object) -> Tensor:
        return loss_of(last.logits(rows), part)

    total, start = hidden.new_zeros(()), 0
    for rows in hidden.chunk(N_CHUNKS):
        part = tree_map(partial(_cut, len(hidden), start, len(rows)), targets)
        of_chunk: Tensor = checkpoint(loss, rows, part, use_reentrant=False)
        total, start = total + of_chunk * (len(rows) / len(hidden)), start + len(rows)
    return total


def _cut(n_rows: int, start: int, length: int, leaf: object) -> object:
    """A chunk of a target of each row; what has no row for each stays whole."""
    is_of_rows = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == n_rows
    return leaf.narrow(0, start, length) if is_of_rows else leaf  # type: ignore[attr-defined]


def logits_of(loaded: Loaded) -> tuple[str, str]:
    """The last layer, and where it is called, if its output is the model's; else an empty name and the reason."""
    fqn = last_layer(loaded.model)
    calls: list[tuple[object, ...]] = []

    def note(layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        calls.append((output, line_of_model(), *args))

    output: object = None
    with suppress(Exception), loaded.model.get_submodule(fqn).register_forward_hook(note), torch.no_grad():
        output = loaded.output()  # a model that fails has been played before
    if not fqn or len(calls) != 1 or len(calls[0]) != 3:
        return "", f"Not played: {fqn or 'the last layer'} is not called once with one tensor."
    logits, where, _ = calls[0]
    if output is not logits or not isinstance(output, Tensor):
        return "", f"Not played: the model itself computes with the output of {fqn}, made in {where}."
    return fqn, str(where)
