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
2. F remembers roots and leaves of its microbatch ("in flight"): several forwards may run before the first backward.
3. B takes roots and leaves, and fills the gradients of parameters and leaves. I fills the gradients of the leaves
   only, for which another rank waits, and owes W the rest. A zero-bubble schedule fills gaps in this way.
4. Sent tensors are held no longer than torch holds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from explorer.engine.pipeline.cut.build import Pipeline
from explorer.engine.pipeline.play.torch_adapter import backward_input, backward_weight
from explorer.plan.pipeline.actions import Action

Tensors = tuple[Tensor | None, ...]


@dataclass
class StageRunner:
    """Runs the actions of one stage and holds its microbatches in flight."""

    pipeline: Pipeline
    stage: int
    losses: dict[int, Tensor] = field(default_factory=dict)
    _flying: dict[int, tuple[list[Tensor], list[Tensor], Tensors]] = field(default_factory=dict)
    """By microbatch: roots of the backward (outputs, or the loss), leaves, and outputs, which torch keeps as well."""
    _owed: dict[int, tuple[list[Tensor], list[Tensor] | None, list[dict[str, Any]] | None]] = field(
        default_factory=dict
    )
    """By microbatch: roots and gradients, or parameter groups, that W still needs."""
    _buffers: dict[tuple[str, int], Tensors] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.pipeline.parts) - 1

    def take_buffers(self) -> None:
        """Receive buffers for every microbatch, both ways: rule 1."""
        part, device = self.pipeline.parts[self.stage], self.pipeline.trainee.device
        for i in range(self.pipeline.n_microbatches):
            if self.stage:
                self._buffers["F", i] = tuple(torch.empty(m.shape, dtype=m.dtype, device=device) for m in part.metas_in)
            if not self.is_last:
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
        i = action.microbatch
        self.pipeline.modules[self.stage].microbatch = i
        if action.kind == "F":
            return self._forward(i)
        if action.kind == "W":
            self._weight(i)
            return ()
        roots, leaves, _ = self._flying.pop(i)
        gradients = None if self.is_last else self._received_gradients(i)
        if action.kind == "I":
            return self._input(i, roots, gradients, leaves)
        self._backward(roots, gradients)
        return self._take(leaves)

    def _forward(self, i: int) -> Tensors:
        pipeline, part = self.pipeline, self.pipeline.parts[self.stage]
        if self.stage:
            buffers = self._buffers["F", i]
            # The buffer itself becomes the leaf: a copy would be memory that torch's stage does not take.
            leaves = [
                buffer.requires_grad_(meta.requires_grad)
                for buffer, meta in zip(buffers, part.metas_in, strict=True)
                if buffer is not None
            ]
        else:
            leaves = list(pipeline.batches[i][0])
        module = pipeline.modules[self.stage]
        with pipeline.forward_of(i):
            sent = module(*leaves)
            if self.is_last:
                self.losses[i] = pipeline.loss(sent, pipeline.batches[i][1])
        # Rule 2. The outputs of a last stage stay too, as in torch, although the loss is the root there.
        roots = [self.losses[i]] if self.is_last else list(sent)
        self._flying[i] = (roots, leaves, sent)
        return tuple(tensor.detach() for tensor in sent)

    def _received_gradients(self, i: int) -> list[Tensor | None]:
        return list(self._buffers["B", i])

    def _backward(self, roots: list[Tensor], gradients: list[Tensor | None] | None) -> None:
        # A frozen stage, or an output that no parameter touched, has no backward; torch would raise.
        wanted = [k for k, root in enumerate(roots) if root.requires_grad]
        if wanted:
            torch.autograd.backward(
                [roots[k] for k in wanted], None if gradients is None else [gradients[k] for k in wanted]
            )

    def _input(
        self, i: int, roots: list[Tensor], gradients: list[Tensor | None] | None, leaves: list[Tensor]
    ) -> Tensors:
        known = None if gradients is None else [g for g in gradients if g is not None]
        useful = [root for root in roots if root.requires_grad]
        # No rank waits for the gradients of a first stage: its I does nothing, and its W is the whole backward.
        if not self.stage:
            self._owed[i] = (useful, known, None)
            return ()
        # Rule 3: torch walks the graph from outputs to leaves and keeps, group by group, where W has to go on.
        _, groups = backward_input(useful, known, leaves, self.pipeline.modules[self.stage])
        self._owed[i] = ([], None, groups)
        return self._take(leaves)

    def _weight(self, i: int) -> None:
        roots, gradients, groups = self._owed.pop(i)
        if groups is None:
            self._backward(roots, None if gradients is None else list(gradients))
        else:
            backward_weight(self.pipeline.modules[self.stage], groups)

    def _take(self, leaves: list[Tensor]) -> Tensors:
        """Gradients of the leaves, which let go of them: rule 4."""
        if not self.stage:
            return ()
        taken = tuple(leaf.grad for leaf in leaves)
        for leaf in leaves:
            leaf.grad = None
        return taken
