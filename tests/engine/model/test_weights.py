"""Weights come from files that cannot run code, and fit the model or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from explorer.engine.model.load import load
from explorer.errors import BadInput, ModelNotLoaded
from explorer.record import ModelRef


def test_weights_come_from_files_that_cannot_run_code(package: str, tmp_path: Path) -> None:
    target = f"{package}:Net"
    donor = load(ModelRef(target=target), seed=1).model.state_dict()
    torch.save({"state_dict": donor}, tmp_path / "w.pt")
    loaded = load(ModelRef(target=target, weights=str(tmp_path / "w.pt")))
    assert all(torch.equal(value, donor[name]) for name, value in loaded.model.state_dict().items())
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(BadInput, match="cannot be read as weights"):
        load(ModelRef(target=target, weights=str(tmp_path / "module.pt")))
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(BadInput, match="holds no state_dict"):
        load(ModelRef(target=target, weights=str(tmp_path / "list.pt")))
    with pytest.raises(ModelNotLoaded, match="of another shape are"):
        load(ModelRef(target=target, arguments={"width": 4}, weights=str(tmp_path / "w.pt")))
    with pytest.raises(ModelNotLoaded, match=r"the model has no .*blocks\.1"):
        load(ModelRef(target=target, arguments={"depth": 1}, weights=str(tmp_path / "w.pt")))
    with pytest.raises(BadInput, match="no file"):
        load(ModelRef(target=target, weights="nowhere.pt"))


def test_safetensors_are_read_where_the_library_is(package: str, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    target = f"{package}:Net"
    donor = load(ModelRef(target=target), seed=1).model.state_dict()
    save_file(donor, tmp_path / "w.safetensors")
    loaded = load(ModelRef(target=target, weights=str(tmp_path / "w.safetensors")))
    assert all(torch.equal(value, donor[name]) for name, value in loaded.model.state_dict().items())
