"""What nobody tagged has a role by its life: born in a forward and alive at its end is saved for backward."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from explorer.engine.bench.timeline import RECOMPUTED, SAVED, TEMPORARY, TrackedStep, as_ints
from explorer.engine.policy.apply import apply_policy
from explorer.engine.watch.tracker import Tracker
from explorer.record import Policy

N = 1009
"""Elements of each activation; nothing else in the step has as many."""


def tracked(policy: Policy) -> TrackedStep:
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Sigmoid()), nn.Tanh())
    x = torch.ones(N, requires_grad=True)
    tracker = Tracker(model, torch.device("cpu"), [])
    with apply_policy(model, policy), tracker:
        tracker.on_phase("forward")
        loss = model(x).sum()
        tracker.on_phase("backward")
        loss.backward()
    return TrackedStep(tracker)


def roles_of(step: TrackedStep) -> list[int]:
    """Roles of the activations, in order of birth."""
    return [int(role) for role, n_bytes in zip(step.roles(), step.n_bytes) if n_bytes == 4 * N]


def test_what_lives_beyond_forward_is_saved_and_what_backward_makes_is_not() -> None:
    roles = roles_of(tracked(Policy()))
    assert roles[:3] == [SAVED] * 3 and set(roles[3:]) == {TEMPORARY}


def test_what_runs_again_is_recomputed() -> None:
    roles = roles_of(tracked(Policy.recompute(["0"])))
    assert roles[:3] == [TEMPORARY, TEMPORARY, SAVED]  # tanh saves what it returns
    assert roles.count(RECOMPUTED) == 2


def test_births_come_before_deaths_and_the_peak_is_their_running_sum() -> None:
    step = tracked(Policy())
    born, died = step.turn(of_death=False), step.turn(of_death=True)
    assert (born < died).all() and born.max() < len(step.turns)
    alive = [step.n_bytes[(born <= turn) & (died > turn)].sum() for turn in range(len(step.turns))]
    assert step.peak_bytes(np.ones(len(step.n_bytes), dtype=bool)) == max(alive)
    assert step.peak_bytes(np.zeros(len(step.n_bytes), dtype=bool)) == 0


def test_a_column_is_read_as_whole_numbers() -> None:
    assert as_ints([1, 2]).dtype == np.int64 and as_ints([]).shape == (0,)
