"""What all trainers' callbacks do: a watch from the training's start to its end, with what was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from explorer.own_loop.watch import WatchCallback


def test_chosen_steps_are_written_and_nothing_stays_behind(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = WatchCallback(at=(2,), files=str(tmp_path / "step{step}.explorer"))
    watching.begin(model, optimizer, "Trainer")
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    watching.end()
    assert watching.watch is not None and set(watching.watch.runs) == {2} and watching.watch.where == "Trainer"
    assert [path.name for path in tmp_path.iterdir()] == ["step2.explorer"]
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_a_training_that_broke_off_is_over_when_the_next_begins(tmp_path: Path) -> None:
    model, before = nn.Linear(4, 4), (sys.excepthook, torch.autograd.backward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = WatchCallback(at=1, on_oom=tmp_path / "oom.explorer", files=str(tmp_path / "step{step}.explorer"))
    watching.begin(model, optimizer, "Trainer")
    watching.begin(model, optimizer, "Trainer")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    watching.end()
    assert watching.watch is not None and set(watching.watch.runs) == {1}
    assert (sys.excepthook, torch.autograd.backward) == before
    assert not model._forward_hooks and not optimizer._optimizer_step_post_hooks


def test_a_training_that_never_began_has_nothing_to_end() -> None:
    watching = WatchCallback(at=1)
    watching.end()
    assert watching.watch is None
