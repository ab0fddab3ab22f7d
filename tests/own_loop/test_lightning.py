"""The callback of Lightning's Trainer, as the Trainer calls it; whole fits stand in test_foreign_loops.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from explorer.errors import OutOfMemory
from explorer.jobs.run_file import read
from explorer.record import Measurement
from explorer.record.base import from_msgpack


class Module(nn.Linear):
    """Stands for a LightningModule."""


def test_an_error_of_memory_is_written_before_it_leaves(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from explorer.own_loop.lightning import LightningCallback

    model, path = Module(4, 4), tmp_path / "oom.explorer"
    callback = LightningCallback(on_oom=path)
    callback.on_train_start(None, model)
    callback.on_exception(None, model, OutOfMemory("full", asked_bytes=7))
    run = from_msgpack(read(path.read_bytes()).record, Measurement)
    assert run.failure is not None and run.failure.asked_bytes == 7 and "Module" in run.recorded_in
    assert not model._forward_pre_hooks


def test_who_interrupts_a_fit_ends_the_watch_too() -> None:
    pytest.importorskip("lightning.pytorch")
    from explorer.own_loop.lightning import LightningCallback

    model, callback = Module(4, 4), LightningCallback(at=1)
    callback.on_train_start(None, model)
    callback.on_exception(None, model, KeyboardInterrupt())
    assert not model._forward_pre_hooks
