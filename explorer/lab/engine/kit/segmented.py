"""Checkpointing without a graph that spans the net: run segment by segment, then backward segment by segment.

    forward    x ──▶ segment 0 ──▶ b1 ──▶ segment 1 ──▶ b2 ──▶ loss      only x, b1, b2 and the RNG states stay
    backward   store ◀── segment 0 again ◀── g1 ◀── segment 1 again ◀── g2

Frameworks whose autograd has no hooks (candle) work like this, and the engine shows the parts of a checkpoint.

1. The graph of a segment lives only during the forward or the backward of the segment.
2. A segment that runs again draws the same random numbers and does not move running statistics a second time.
3. One store of gradients grows by addition. A weight that several segments share gets the sum of their gradients, in
   the order of one long backward. The store enters each segment's backward as the first summand (see `_Start`), so
   the result equals that of the plain run in every bit. Sums per segment would give (a + b) + (c + d), which rounds
   differently from ((a + b) + c) + d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.engine.policy.units import Recomputing
from explorer.engine.state.rng import RngState
from explorer.errors import InvalidPolicy
from explorer.lab.engine.kit.bench import mean_square
from explorer.lab.engine.kit.nets import Recurrent

Merge = Literal["add", "overwrite", "per_segment"]
"""add: one store, summed (the right way). overwrite: one store, the last segment to write a name wins (wrong as soon
as a weight is shared). per_segment: one store a segment, nothing merged (holds shared weights once a segment)."""

Store = dict[str, Tensor]
"""Gradients by parameter name."""

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Chain:
    """A net as a chain of steps, one tensor in and one out. `model` owns the parameters that the steps use."""

    model: nn.Module
    steps: tuple[Step, ...]
    loss: Step

    @classmethod
    def of(cls, model: nn.Sequential, loss: Step) -> Chain:
        """The children of a Sequential, one step each."""
        return cls(model, tuple(model), loss)

    def plain(self, x: Tensor) -> Tensor:
        """The loss of one ordinary run that keeps its whole graph."""
        return self.loss(_run(self.steps, x))

    @property
    def trainable(self) -> Store:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class SegmentedStep:
    """The results of a segmented step. `stores` holds one store, or one for each segment (last segment first)."""

    loss: Tensor
    stores: tuple[Store, ...]


@dataclass(frozen=True)
class _Entry:
    """The data kept of a segment between its forward and its backward."""

    steps: Sequence[Step]
    input: Tensor
    rng: RngState


def segmented_step(chain: Chain, x: Tensor, n_segments: int, merge: Merge = "add") -> SegmentedStep:
    """Forward and backward of `chain` in `n_segments` segments of nearly equal length; no `.grad` is touched.

    With `merge="add"` gradients equal those of `chain.plain(x).backward()` in every bit. The forward of a segment runs
    with grad mode on, and its graph is dropped at once: under no_grad torch may choose kernels that round differently.
    Raises InvalidPolicy if there are fewer steps than segments.
    """
    entries: list[_Entry] = []
    state = x
    for steps in cut(chain.steps, n_segments):
        entries.append(_Entry(steps, state, RngState.capture(chain.model)))
        state = _run(steps, _leaf(state, x)).detach()
    loss, gradients = _loss(chain, state)
    del state
    after = RngState.capture(chain.model)

    stores: list[Store] = [] if merge == "per_segment" else [{}]
    while entries:
        entry = entries.pop()
        entry.rng.restore()
        begin = _Gradients(gradients, stores[0] if merge == "add" else {})
        with Recomputing((chain.model,)):
            gradients, store = _pull_back(chain, entry.steps, _leaf(entry.input, x), begin)
        if merge == "per_segment":
            stores.append(store)
        else:
            stores[0].update(store)
        del store  # a second owner would keep backward from adding in place
    after.restore()
    return SegmentedStep(loss, tuple(stores))


def cut(steps: Sequence[Step], n_segments: int) -> list[Sequence[Step]]:
    """`n_segments` consecutive runs of steps whose lengths differ by one at most; the first ones are the longer."""
    if not 1 <= n_segments <= len(steps):
        raise InvalidPolicy(
            f"{n_segments} segments were asked of a chain of {len(steps)} steps.",
            hint="Every segment holds at least one step.",
        )
    length, longer = divmod(len(steps), n_segments)
    ends = [length * (i + 1) + min(i + 1, longer) for i in range(n_segments)]
    return [steps[end - length - (i < longer) : end] for i, end in enumerate(ends)]


def recurrent_chain(net: Recurrent, sequence: Tensor) -> Chain:
    """A chain with one step for each token, which passes the state along."""
    steps = tuple(partial(net.cell, token=sequence[:, t]) for t in range(sequence.shape[1]))
    return Chain(net, steps, mean_square)


def checkpointed_loss(chain: Chain, x: Tensor, n_segments: int) -> Tensor:
    """The loss, with the same segments under torch's own checkpoint."""
    for steps in cut(chain.steps, n_segments):
        x = checkpoint(partial(_run, steps), x, use_reentrant=False)
    return chain.loss(x)


def install(store: Store, model: nn.Module) -> None:
    """Makes `store` the gradients that an optimizer sees; parameters without an entry get None."""
    for name, parameter in model.named_parameters():
        parameter.grad = store.get(name)


def _run(steps: Sequence[Step], x: Tensor) -> Tensor:
    for step in steps:
        x = step(x)
    return x


def _loss(chain: Chain, output: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss without its graph, which would hold the output, and the gradient at the output."""
    output.requires_grad_()
    loss = chain.loss(output)
    return loss.detach(), list(torch.autograd.grad(loss, output))


def _leaf(state: Tensor, x: Tensor) -> Tensor:
    """The input of a segment, detached; it requires a gradient unless it is `x`, the input of the net."""
    return state.detach().requires_grad_(state is not x)


@dataclass(frozen=True)
class _Gradients:
    """The start of a segment's backward. Backward removes both fields, so that no other reference keeps them alive."""

    output_gradient: list[Tensor]
    store: Store


def _pull_back(chain: Chain, steps: Sequence[Step], start: Tensor, begin: _Gradients) -> tuple[list[Tensor], Store]:
    """Runs a segment again and backward: the gradient at its input (none of the net's own), and its parameters'."""
    parameters = chain.trainable
    shared = tuple(begin.store)
    token = _Start.apply(begin, shared, _run(steps, start), *(parameters[name] for name in shared))
    leaves = [start] if start.requires_grad else []
    pulled = torch.autograd.grad(token, [*leaves, *parameters.values()], allow_unused=True)
    del token
    of_parameters = pulled[len(leaves) :]
    return list(pulled[: len(leaves)]), {name: g for name, g in zip(parameters, of_parameters) if g is not None}


class _Start(torch.autograd.Function):
    """The node where a segment's backward begins: it hands out the gradient at the output, and the store so far.

    Autograd adds up the gradients of a parameter in order of arrival, and gradients of this node arrive first. The node
    drops its references, so autograd is the only owner, adds in place, and makes no second copy.
    """

    @staticmethod
    def forward(ctx: Any, begin: _Gradients, shared: tuple[str, ...], output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.begin, ctx.shared = begin, shared
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *token_gradient: object) -> object:
        return (None, None, ctx.begin.output_gradient.pop(), *(ctx.begin.store.pop(name) for name in ctx.shared))
