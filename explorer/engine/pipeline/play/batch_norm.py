"""Running statistics that move once per batch, however many microbatches pass.

Each microbatch is normalised by its statistics, as in any microbatched run. The update of running_mean and running_var
is deferred, and takes mean and variance of the whole batch (torchgpipe's DeferredBatchNorm).
Statistics are gathered where a module runs forward, not where it runs again for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from explorer.engine.policy.units import is_recomputing


@dataclass
class _Sums:
    module: _BatchNorm
    mean: Tensor
    var: Tensor
    n_batches: Tensor | None
    total: Tensor | None = None
    squares: Tensor | None = None
    n: int = 0

    def add(self, args: tuple[Any, ...]) -> None:
        if is_recomputing() or not args:
            return
        x = args[0].detach().double()
        over = [d for d in range(x.dim()) if d != 1]
        self.total = x.sum(over) + (0 if self.total is None else self.total)
        self.squares = x.square().sum(over) + (0 if self.squares is None else self.squares)
        self.n += x.numel() // x.shape[1]

    def commit(self) -> None:
        """Restores the statistics from before the batch, then updates the statistics once."""
        module = self.module
        assert module.running_mean is not None and module.running_var is not None
        module.running_mean.copy_(self.mean)
        module.running_var.copy_(self.var)
        if module.num_batches_tracked is not None and self.n_batches is not None:
            module.num_batches_tracked.copy_(self.n_batches)
        if self.total is None or self.squares is None:
            return
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        momentum = module.momentum
        if momentum is None:
            assert module.num_batches_tracked is not None
            momentum = 1.0 / float(module.num_batches_tracked)
        mean = self.total / self.n
        var = (self.squares / self.n - mean.square()) * (self.n / max(self.n - 1, 1))
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
        module.running_var.lerp_(var.to(module.running_var.dtype), momentum)


@contextmanager
def deferred_batch_norm(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Around one batch of microbatches: the running statistics of every training BatchNorm move once, at the end."""
    if not enabled:
        yield
        return
    with ExitStack() as hooks:
        gathered = []
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
                assert module.running_var is not None
                counter = module.num_batches_tracked
                sums = _Sums(
                    module,
                    module.running_mean.clone(),
                    module.running_var.clone(),
                    None if counter is None else counter.clone(),
                )
                hook = module.register_forward_pre_hook(lambda m, args, sums=sums: sums.add(args))
                hooks.callback(hook.remove)
                gathered.append(sums)
        yield
        with torch.no_grad():
            for sums in gathered:
                sums.commit()
