"""A stage that runs its actions: forward and backward of a microbatch, split or whole, like torch's PipelineStage.

The problem. Autograd's graph ends at the border of a stage, because the next stage computes on another rank. So the
chain rule crosses the border by hand: the output goes forward, its gradient comes back.

The idea. Each received tensor is a leaf of the stage's graph. Backward from the outputs fills the leaf's `.grad`, and
the previous stage waits for this gradient.

    received ─▶ [buffer, a leaf] ─▶ stage ─▶ outputs ─▶ sent          F
    sent back ◀─ [leaf.grad] ◀──── stage ◀─ [buffer] ◀─ received      B, or I now and W later

The mechanism.
1. Buffers for all received tensors are taken before the first action and kept to the end, as in torch 2.13. Memory by
   rank would be wrong without these buffers.
2. F stores roots and leaves of its microbatch ("in flight"): several forwards may run before the first backward.
3. B takes roots and leaves, and fills the gradients of parameters and leaves. I fills the gradients of the leaves
   only, for which another rank waits, and owes W the rest. A zero-bubble schedule fills gaps in this way.
4. Sent tensors are held no longer than torch holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from explorer.engine.pipeline.build import Pipeline
from explorer.engine.pipeline.torch_adapter import backward_input, backward_weight
from explorer.plan.pipeline.actions import Action

Tensors = tuple[Tensor | None, ...]


class StageRunner:
    """Runs the actions of one stage and holds its microbatches in flight."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self._pipeline, self._part, self._module = pipeline, pipeline.parts[stage], pipeline.modules[stage]
        self.losses: dict[int, Tensor] = {}
        self._in_flight: dict[int, tuple[list[Tensor], list[Tensor], Tensors]] = {}
        """By microbatch: roots of the backward (outputs, or the loss), leaves, and outputs, which torch keeps too."""
        self._owed: dict[int, Callable[[], None]] = {}
        """By microbatch: what W still has to do."""
        self._buffers: dict[tuple[str, int], Tensors] = {}

    def take_buffers(self) -> None:
        """Receive buffers for every microbatch, both ways: rule 1."""
        part, device = self._part, self._pipeline.trainee.device
        for i in range(self._pipeline.n_microbatches):
            if part.stage:
                self._buffers["F", i] = tuple(torch.empty(m.shape, dtype=m.dtype, device=device) for m in part.metas_in)
            if not part.is_last:
                self._buffers["B", i] = tuple(
                    torch.empty(m.shape, dtype=m.dtype, device=device) if m.requires_grad else None
                    for m in part.metas_out
                )

    def receive(self, kind: str, microbatch: int, sent: Tensors, *, local: bool) -> None:
        """Boundary tensors ("F") or their gradients ("B") arrive: from the same rank as they are, else as a copy."""
        if local:
            self._buffers[kind, microbatch] = tuple(None if tensor is None else tensor.detach() for tensor in sent)
            return
        for buffer, tensor in zip(self._buffers[kind, microbatch], sent, strict=True):
            if buffer is not None and tensor is not None:
                buffer.detach().copy_(tensor)
            elif buffer is not None:
                buffer.zero_()

    def do(self, action: Action) -> Tensors:
        """Runs `action` and returns the tensors to send: outputs for F, gradients of received tensors for B and I."""
        i, part = action.microbatch, self._part
        self._module.microbatch = i
        if action.kind == "F":
            return self._forward(i)
        if action.kind == "W":
            self._owed.pop(i)()
            return ()
        outputs, leaves, _ = self._in_flight.pop(i)
        # A frozen stage, or an output that no parameter touched, has no backward; torch would raise.
        useful = [k for k, output in enumerate(outputs) if output.requires_grad]
        roots = [outputs[k] for k in useful]
        gradients = None if part.is_last else [self._buffers["B", i][k] for k in useful]
        if action.kind == "B":
            _backward(roots, gradients)
        elif part.stage:
            # Rule 3: torch walks the graph from outputs to leaves and keeps, group by group, where W has to go on.
            _, groups = backward_input(roots, gradients, leaves, self._module)
            self._owed[i] = partial(backward_weight, self._module, groups)
        else:  # no rank waits for the gradients of a first stage: its I does nothing, its W is the whole backward
            self._owed[i] = partial(_backward, roots, gradients)
            return ()
        if not part.stage:
            return ()
        sent = tuple(leaf.grad for leaf in leaves)
        for leaf in leaves:  # the leaves let go of their gradients: rule 4
            leaf.grad = None
        return sent

    def _forward(self, i: int) -> Tensors:
        pipeline, part = self._pipeline, self._part
        if part.stage:
            # The buffer itself becomes the leaf: a copy would be memory that torch's stage does not take.
            leaves = [
                buffer.requires_grad_(meta.requires_grad)
                for buffer, meta in zip(self._buffers["F", i], part.metas_in, strict=True)
                if buffer is not None
            ]
        else:
            leaves = list(pipeline.batches[i][0])
        with pipeline.forward_of(i):
            sent = self._module(*leaves)
            if part.is_last:
                self.losses[i] = pipeline.loss(sent, pipeline.batches[i][1])
        # Rule 2. The outputs of a last stage stay too, as in torch, although the loss is the root there.
        self._in_flight[i] = ([self.losses[i]] if part.is_last else list(sent), leaves, sent)
        return tuple(tensor.detach() for tensor in sent)


def _backward(roots: list[Tensor], gradients: list[Tensor | None] | None) -> None:
    if roots:
        torch.autograd.backward(roots, gradients)
