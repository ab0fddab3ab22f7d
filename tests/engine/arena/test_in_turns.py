"""Contestants take turns: as many steps each as asked, everybody once a round, and who does not fit takes none."""

from __future__ import annotations

import pytest

from explorer.engine.arena import in_turns
from explorer.engine.arena.in_turns import timed_in_turns
from explorer.engine.device.apart import apart
from explorer.engine.device.device import Device
from explorer.engine.policy.apply import policy_of
from explorer.engine.step import Trainee, run_step
from explorer.errors import OutOfMemory
from explorer.record import KEEP_ALL, Policy, RunSpec
from explorer.record.progress import Progress, silent
from tests.engine.tiny_nets import ref

MIB = 1024**2
SPEC = RunSpec(model=ref("gpt"), n_repeats=3)


def test_everybody_steps_once_a_round() -> None:
    told: list[Progress] = []
    policies = (KEEP_ALL, Policy.recompute(["blocks.0"]), Policy.recompute(["blocks.0", "blocks.1"]))
    times = timed_in_turns(SPEC, policies, told.append)
    assert [len(one.ms) for one in times] == [3, 3, 3] and all(ms > 0 for one in times for ms in one.ms)
    assert [progress.done for progress in told] == list(range(told[0].total)), "each step is told"
    assert told[0].total == len(policies) * (1 + 1 + SPEC.n_repeats)


def test_each_step_is_under_its_own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock: a step that is told to take as many milliseconds as units are in force."""
    monkeypatch.setattr(in_turns, "step_ms", lambda trainee, clock: {"step": len(policy_of(trainee.model).units)})
    policies = tuple(Policy.recompute([f"blocks.{i}" for i in range(n)]) for n in (0, 2, 1))
    assert [one.ms for one in timed_in_turns(SPEC, policies, silent)] == [(0,) * 3, (2,) * 3, (1,) * 3]


@pytest.mark.slow
def test_who_does_not_fit_takes_no_part() -> None:
    """In a process of its own: memory that was freed here counts as had."""
    spec = RunSpec(model=ref("wide", mib=1, depth=6), n_repeats=2, memory_limit_bytes=40 * MIB)
    policies = (KEEP_ALL, Policy.recompute([str(i) for i in range(6)]))
    times = apart(timed_in_turns, spec, policies, report=silent, what="took turns")
    assert times is not None and [len(one.ms) for one in times] == [0, 2]


def test_who_fits_until_its_optimizer_has_a_state_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(device: Device, trainee: Trainee) -> float:
        if trainee.optimizer is not None and trainee.optimizer.state and not policy_of(trainee.model).units:
            raise OutOfMemory("The run asked for more memory and was refused.")
        return run_step(trainee)

    monkeypatch.setattr(in_turns, "run_limited", limited)
    times = timed_in_turns(SPEC, (KEEP_ALL, Policy.recompute(["blocks.0"])), silent)
    assert [len(one.ms) for one in times] == [0, 3]
