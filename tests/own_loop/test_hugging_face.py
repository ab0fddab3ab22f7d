"""The callback of transformers' Trainer, as the Trainer calls it; whole trainings stand in test_foreign_loops.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn


def test_it_watches_from_begin_to_end(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from explorer.own_loop.hugging_face import HuggingFaceCallback

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = HuggingFaceCallback(at=1, files=str(tmp_path / "step{step}.explorer"))
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    callback.on_train_end(None, None, None, model=model)
    assert callback.watch is not None and callback.watch.runs[1].measurement.recorded_in == "Trainer, step 1"
    assert (tmp_path / "step1.explorer").exists()
    assert not model._forward_pre_hooks
