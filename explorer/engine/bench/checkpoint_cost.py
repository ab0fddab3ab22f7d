"""Time of torch.utils.checkpoint beside the second forward: of each call, and of each tensor saved in the call.

Modules of few or many cheap operators are timed kept, recomputed, and forward alone. The difference is Python, the
generator's state, and repeated requests for memory.

A model's tensors sweep the CPU caches that hold this Python code. A call took 0.09 ms between modules without a sweep,
and 0.6 ms around blocks of the sample models. A saved tensor took 0.01 ms in both. The measurement therefore sweeps
the caches between calls and subtracts the time of the sweeps. After 16 MiB a call takes 0.2 ms; after 48 MiB and more
0.48 ms, on a CPU whose cores share 32 MiB.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.engine.device.device import Clock, device_of
from explorer.engine.policy.apply import apply_policy
from explorer.record.policy import KEEP_ALL, Policy

N_MODULES = 3
FEW, MANY = 2, 14
"""Operators of a module. Each operator saves one tensor."""
N_ROUNDS = 9
"""Readings, reduced to their median: a call takes tenths of a millisecond."""
SWEPT_BYTES = 2**26
"""Twice what the cores of an EPYC share."""

_RECOMPUTED = Policy.recompute([str(i) for i in range(N_MODULES)])


class CheckpointCost(NamedTuple):
    """Milliseconds of a checkpointed call beside its second forward."""

    call_ms: float
    """After a model has swept the caches since the last call."""
    close_call_ms: float
    """Directly after another call."""
    saved_tensor_ms: float
    """Extra time for each tensor saved in the call."""


def warm_checkpoint(device: torch.device) -> None:
    """Calls torch.utils.checkpoint once: the first call imports torch._dynamo (seconds), at no policy's charge."""
    value = torch.ones(1, device=device, requires_grad=True)
    checkpoint(torch.exp, value, use_reentrant=False).sum().backward()


@cache
def checkpoint_cost(device: torch.device) -> CheckpointCost:
    """The cost on this machine by the step's clock, read once per process in a third of a second."""
    return read_cost(device, device_of(device).clock())


def read_cost(device: torch.device, clock: Clock) -> CheckpointCost:
    """The cost from medians of N_ROUNDS readings, each figure at least 0. No random number is drawn."""
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
    """N_MODULES modules of `n_operators` operators. `sweep` is called before each forward and each recompute."""

    def __init__(self, n_operators: int, device: torch.device, clock: Clock, sweep: _Sweep | None) -> None:
        self._modules = nn.ModuleList(_Sines(n_operators) for _ in range(N_MODULES))
        self._given = torch.ones(64, device=device, requires_grad=True)
        self._clock, self._sweep = clock, sweep

    def overhead_ms(self) -> float:
        """Time of a checkpointed call beyond a kept call and a forward."""
        kept_ms, forward_ms = self._step_ms(KEEP_ALL)
        again_ms, _ = self._step_ms(_RECOMPUTED)
        return (again_ms - kept_ms - forward_ms) / N_MODULES

    def _step_ms(self, policy: Policy) -> tuple[float, float]:
        """Milliseconds of forward and backward together, and of the modules' forward alone."""
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
    """Cheap operators that save their input, so that every operator runs again."""

    def __init__(self, n_operators: int) -> None:
        super().__init__()
        self._n_operators = n_operators

    def forward(self, value: Tensor) -> Tensor:
        for _ in range(self._n_operators):
            value = value.sin()
        return value


class _Sweep:
    """Reads enough memory to displace the CPU caches, and times the reads. No operator of torch runs."""

    def __init__(self, clock: Clock) -> None:
        self._memory = bytearray(b"\x01") * SWEPT_BYTES  # never written, all of it would be one page of zeros
        self._clock = clock
        self._spans: list[tuple[object, object]] = []

    def __call__(self, _: Tensor | None = None) -> None:
        begun = self._clock.mark()
        self._memory.find(0)
        self._spans.append((begun, self._clock.mark()))

    def taken_ms(self) -> float:
        """Milliseconds of sweeps since the last call of this function."""
        spans, self._spans = self._spans, []
        return sum(self._clock.between_ms(*span) for span in spans)
