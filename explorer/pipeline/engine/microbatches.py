"""Microbatches, and two things that would depend on their number or order: random numbers and running statistics.

(1) A pipelined model runs its microbatches in another order and on other ranks than the unsplit model. A single stream
    of random numbers gives other dropout masks, so every block draws from a seed made of (seed, block, microbatch). If
    the block is a unit, the seeding is outside the checkpointed function. Torch stashes the generator when the block
    starts and restores the generator for recompute, in B as in I and W. Blocks inside a larger unit are seeded again by
    the microbatch whose backward runs. Operations between two blocks continue the stream of the first block.
(2) Each microbatch is normalised by its own statistics. The update of running_mean and running_var may be deferred to
    the end of the batch, with mean and variance of the whole batch (torchgpipe's DeferredBatchNorm). Statistics are
    gathered where a module runs forward, not where it runs again for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from explorer.engine.bench.step import Trainee, split
from explorer.engine.policy.units import is_recomputing
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.state.rng import seed_torch
from explorer.errors import BadInput, InvalidPlan

PRIME = 1_000_003
START = "(start)"
"""The stretch before the first block."""


def microbatches(trainee: Trainee, n_microbatches: int) -> list[tuple[object, object]]:
    """(inputs, targets) by microbatch. Raises InvalidPlan where the batch does not divide, with counts that do."""
    try:
        return split(trainee.inputs, trainee.targets, n_microbatches)
    except BadInput as error:
        n_rows = n_rows_of(trainee.inputs)
        divisors = [str(n) for n in range(1, n_rows + 1) if n_rows % n == 0]
        hint = f"Use {', '.join(divisors)} microbatches, or pad the batch." if divisors else "Give the model a batch."
        raise InvalidPlan(
            f"A batch of {n_rows} rows does not divide into {n_microbatches} microbatches: a smaller last one would "
            "weigh as much as the others, and stages need one shape.",
            hint=hint,
        ) from error


def n_rows_of(inputs: object) -> int:
    """Rows of the first tensor that has any; 0 without one."""
    return next((leaf.shape[0] for leaf in tensor_leaves(inputs) if leaf.dim()), 0)


@dataclass
class KeyedRng:
    """Seeds torch's default generators by block and microbatch; does nothing when `enabled` is False."""

    seed: int
    chain: tuple[str, ...]
    enabled: bool = True
    index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.index = {fqn: k for k, fqn in enumerate((START, *self.chain))}

    def enter(self, block: str, microbatch: int) -> None:
        """`block` of the chain (or START) is about to run forward for `microbatch`."""
        if self.enabled and block in self.index:
            seed_torch(((self.seed * PRIME + self.index[block]) * PRIME + microbatch) % 2**63)

    @contextmanager
    def seeding(self, model: nn.Module, numbers: Iterable[int]) -> Iterator[Iterator[int]]:
        """For an unsplit model: hooks that seed its blocks. Yields an iterator that moves on to the next microbatch."""
        microbatch = 0

        def each() -> Iterator[int]:
            nonlocal microbatch
            for microbatch in numbers:
                self.enter(START, microbatch)
                yield microbatch

        hooks = [
            model.get_submodule(fqn).register_forward_pre_hook(
                lambda module, args, fqn=fqn: self.enter(fqn, microbatch)
            )
            for fqn in self.chain
        ]
        try:
            yield each()
        finally:
            for hook in hooks:
                hook.remove()


class _Statistics:
    """Sums of one BatchNorm's inputs over the microbatches of a batch, and its buffers from before the batch."""

    def __init__(self, module: _BatchNorm) -> None:
        self._module, self._n = module, 0
        buffers = {name: getattr(module, name) for name in ("running_mean", "running_var", "num_batches_tracked")}
        self._before = {name: buffer.clone() for name, buffer in buffers.items() if buffer is not None}
        self._total: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if is_recomputing() or not args:
            return
        x = args[0].detach().double()
        over = [d for d in range(x.dim()) if d != 1]
        self._total = x.sum(over) + (0 if self._total is None else self._total)
        self._squares = x.square().sum(over) + (0 if self._squares is None else self._squares)
        self._n += x.numel() // x.shape[1]

    def commit(self) -> None:
        """Restores the statistics from before the batch, then updates the statistics once."""
        module, n = self._module, self._n
        assert module.running_mean is not None and module.running_var is not None
        for name, buffer in self._before.items():
            getattr(module, name).copy_(buffer)
        if self._total is None or self._squares is None:
            return
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        momentum = module.momentum
        if momentum is None:
            assert module.num_batches_tracked is not None
            momentum = 1.0 / float(module.num_batches_tracked)
        mean = self._total / n
        var = (self._squares / n - mean.square()) * (n / max(n - 1, 1))
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
        module.running_var.lerp_(var.to(module.running_var.dtype), momentum)


@contextmanager
def deferred_batch_norm(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Around one batch of microbatches: the running statistics of every training BatchNorm move once, at the end."""
    norms = [
        module
        for module in (model.modules() if enabled else ())
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None
    ]
    with ExitStack() as hooks:
        statistics = [_Statistics(module) for module in norms]
        for norm, sums in zip(norms, statistics):
            hooks.callback(norm.register_forward_pre_hook(sums.add).remove)
        yield
        with torch.no_grad():
            for sums in statistics:
                sums.commit()
