"""Who runs, in which thread, and whether it runs again: told in order, and balanced when an exception cuts it short."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from explorer.engine.policy.apply import apply_policy
from explorer.engine.watch.scopes import BlockScopes, Frame
from explorer.record import Policy, Unit


class Heard:
    """What a listener is told, in words."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fqns: tuple[str, ...] = ()

    def entered(self, block: int, frame: Frame, inputs: Any) -> None:
        self.told.append(f"{'again' if frame.reruns else 'into'} {self.fqns[block]}")

    def left(self, block: int, frame: Frame, output: Any) -> None:
        self.told.append(f"out of {self.fqns[block]}")

    def rerun_changed(self, frame: Frame) -> None:
        self.told.append("segment begins" if frame.reruns else "segment ends")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Tanh())


def heard(policy: Policy, *, segments: tuple[str, ...] = ()) -> list[str]:
    model, listener = net(), Heard()
    scopes = BlockScopes(model, listener, segments=segments)
    listener.fqns = scopes.fqns
    with apply_policy(model, policy), scopes:
        loss = model(torch.ones(1, 2)).sum()
        listener.told.clear()
        loss.backward()
    assert scopes.frame.stack == [0] and not scopes.frame.reruns
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    return listener.told


def test_forward_is_told_inside_out() -> None:
    model, listener = net(), Heard()
    scopes = BlockScopes(model, listener)
    listener.fqns = scopes.fqns
    with scopes:
        model(torch.ones(1, 2))
    inside = ["into 0", "into 0.0", "out of 0.0", "into 0.1", "out of 0.1", "out of 0", "into 1", "out of 1"]
    assert listener.told == ["into ", *inside, "out of "]


def test_a_block_that_runs_again_is_entered_though_its_own_hooks_are_silent() -> None:
    assert heard(Policy()) == []
    again = ["again 0", "again 0.0", "out of 0.0", "again 0.1", "out of 0.1", "out of 0"]
    assert heard(Policy.recompute(["0"], early_stop=False)) == again


def test_a_segment_is_told_by_its_blocks() -> None:
    policy = Policy(units=(Unit(blocks=("0", "1")),), early_stop=False)
    told = heard(policy, segments=("0",))
    assert told[0] == "segment begins" and told[-1] == "segment ends"
    assert told.count("again 0") == told.count("again 1") == 1


def test_what_an_exception_cuts_short_is_left() -> None:
    model, listener = net(), Heard()
    scopes = BlockScopes(model, listener)
    listener.fqns = scopes.fqns
    with pytest.raises(RuntimeError), scopes:
        model(torch.ones(1, 3))
    assert scopes.frame.stack == [0] and listener.told[-3:] == ["out of 0.0", "out of 0", "out of "]


def test_each_thread_has_a_frame_and_two_names_are_one_block() -> None:
    model = net()
    model.again = model[1]
    scopes = BlockScopes(model, Heard())
    frames = [scopes.frame]
    thread = threading.Thread(target=lambda: frames.append(scopes.frame))
    thread.start()
    thread.join()
    assert frames[0] is not frames[1] and scopes.frame is frames[0]
    assert scopes.index["again"] == scopes.index["1"] and "again" not in scopes.fqns
