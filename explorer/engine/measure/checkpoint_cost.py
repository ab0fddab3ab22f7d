"""What torch.utils.checkpoint takes beside the second forward: a call, and each tensor that is saved in it.

Modules that do next to nothing, of few operators or many, are timed kept, recomputed, and forward alone. What is left
over is Python, the generator's state, and memory that is asked for again.

On a CPU that Python comes out of caches which a model's tensors sweep meanwhile: where modules follow each other at
once a call took 0.09 ms, around blocks of the sample models 0.6 ms, and 0.01 ms a saved tensor either way. So the
caches are swept between calls here too, and the sweeps are taken off: behind 16 MiB a call takes 0.2 ms, behind 48 MiB
and more 0.48 ms, on a CPU whose cores share 32 MiB.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from explorer.engine.device.clocks import Clock
from explorer.engine.device.device import device_of
from explorer.engine.policy.apply import apply_policy
from explorer.record.policy import KEEP_ALL, Policy

N_MODULES = 3
FEW, MANY = 2, 14
"""Operators of a module, each of which saves one tensor."""
N_ROUNDS = 9
"""Readings, of which the middle one counts: a call takes tenths of a millisecond."""
SWEPT_BYTES = 2**26
"""Twice what the cores of an EPYC share."""

_RECOMPUTED = Policy.recompute([str(i) for i in range(N_MODULES)])


class CheckpointCost(NamedTuple):
    """What a checkpointed call takes beside its second forward."""

    call_ms: float
    """Where a model has swept the caches since the last call."""
    close_call_ms: float
    """Where the last call was just before."""
    saved_tensor_ms: float
    """What it takes more for each tensor that is saved in it."""


@cache
def checkpoint_cost(device: torch.device) -> CheckpointCost:
    """Here, on the step's own clock. Read once a process, in a third of a second: every run has one of its own."""
    return read_cost(device, device_of(device).clock())


def read_cost(device: torch.device, clock: Clock) -> CheckpointCost:
    """Of medians of N_ROUNDS; nothing is less than 0. Draws nothing at random."""
    sweep = _Sweep(clock) if device.type == "cpu" else None
    few, many = (_Chain(n_operators, device, clock, None) for n_operators in (FEW, MANY))
    cold = few if sweep is None else _Chain(FEW, device, clock, sweep)
    cold_ms, few_ms, many_ms = map(_middle_ms, (cold, few, many))
    saved_tensor_ms = max(0.0, (many_ms - few_ms) / (MANY - FEW))
    call_ms, close_call_ms = (max(0.0, ms - FEW * saved_tensor_ms) for ms in (cold_ms, few_ms))
    return CheckpointCost(call_ms, close_call_ms, saved_tensor_ms)


def _middle_ms(chain: _Chain) -> float:
    return statistics.median(chain.overhead_ms() for _ in range(N_ROUNDS))


class _Chain:
    """N_MODULES modules of so many operators each. Before each runs, and before it runs again, `sweep` is called."""

    def __init__(self, n_operators: int, device: torch.device, clock: Clock, sweep: _Sweep | None) -> None:
        self._modules = nn.ModuleList(_Sines(n_operators) for _ in range(N_MODULES))
        self._given = torch.ones(64, device=device, requires_grad=True)
        self._clock, self._sweep = clock, sweep

    def overhead_ms(self) -> float:
        """What a checkpointed call takes more than one that is kept and a forward."""
        kept_ms, forward_ms = self._step_ms(KEEP_ALL)
        again_ms, _ = self._step_ms(_RECOMPUTED)
        return (again_ms - kept_ms - forward_ms) / N_MODULES

    def _step_ms(self, policy: Policy) -> tuple[float, float]:
        """Forward and backward, and the modules' forward alone."""
        clock, sweep, value, spans = self._clock, self._sweep, self._given, []
        with apply_policy(self._modules, policy):
            clock.settle()
            first = clock.mark()
            for module in self._modules:
                if sweep is not None:
                    sweep()
                begun = clock.mark()
                value = module(value)
                spans.append((begun, clock.mark()))
                if sweep is not None:
                    value.register_hook(sweep)
            value.sum().backward()
            last = clock.mark()
            clock.settle()
        swept_ms = 0.0 if sweep is None else sweep.taken_ms()
        return clock.between_ms(first, last) - swept_ms, sum(clock.between_ms(*span) for span in spans)


class _Sines(nn.Module):
    """Operators that take next to no time and save what they are given, so that every one runs again."""

    def __init__(self, n_operators: int) -> None:
        super().__init__()
        self._n_operators = n_operators

    def forward(self, value: Tensor) -> Tensor:
        for _ in range(self._n_operators):
            value = value.sin()
        return value


class _Sweep:
    """Reads so much memory that little else is left in the caches; says how long that took. No operator of torch."""

    def __init__(self, clock: Clock) -> None:
        self._memory = bytearray(b"\x01") * SWEPT_BYTES  # never written, all of it would be one page of zeros
        self._clock = clock
        self._spans: list[tuple[Any, Any]] = []

    def __call__(self, _: Tensor | None = None) -> None:
        begun = self._clock.mark()
        self._memory.find(0)
        self._spans.append((begun, self._clock.mark()))

    def taken_ms(self) -> float:
        """Since this was asked last."""
        spans, self._spans = self._spans, []
        return sum(self._clock.between_ms(*span) for span in spans)
