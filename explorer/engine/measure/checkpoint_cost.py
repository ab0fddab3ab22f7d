"""What torch.utils.checkpoint takes a call beside the second forward: as long as a small module itself, so it counts.

A chain of small modules is timed kept, recomputed, and forward alone. What is left over is Python, the generator's
state, and memory that is asked for again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import nn

from explorer.engine.device.clocks import Clock
from explorer.engine.policy.apply import apply_policy
from explorer.record.policy import Policy

N_MODULES = 8
N_ROUNDS = 5
"""Readings, of which the middle one counts: a small module's call takes tenths of a millisecond."""


def checkpoint_ms(device: torch.device, clock: Clock) -> float:
    """Milliseconds a call, on `clock`, here and now: the median of N_ROUNDS. Draws nothing at random."""
    chain = nn.Sequential(*(nn.LayerNorm(128) for _ in range(N_MODULES))).to(device)
    value = torch.ones(1024, 128, device=device, requires_grad=True)
    policy = Policy.recompute([str(i) for i in range(N_MODULES)])
    readings = []
    for _ in range(N_ROUNDS):
        kept = _ms(lambda: chain(value).sum().backward(), clock)
        forward = _ms(lambda: chain(value), clock)
        with apply_policy(chain, policy):
            again = _ms(lambda: chain(value).sum().backward(), clock)
        readings.append((again - kept - forward) / N_MODULES)
    return max(0.0, statistics.median(readings))


def _ms(work: Callable[[], object], clock: Clock) -> float:
    clock.settle()
    first = clock.mark()
    work()
    last = clock.mark()
    clock.settle()
    return clock.between_ms(first, last)
