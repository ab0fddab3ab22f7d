"""Which names of its own file and of its author's other files a function uses, and no others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from explorer.engine.state.referenced_names import is_of_author, names_in, referenced_names


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "spoken_helpers.py").write_text("N_CALLS = 0\nDATA = [1]\ndef bump():\n    global N_CALLS\n")
    (tmp_path / "spoken_model.py").write_text(
        "import os\nimport torch\nimport spoken_helpers\nOWN = 1\nUNUSED = 2\n"
        "def forward():\n"
        "    def inner():\n        return OWN\n"
        "    spoken_helpers.bump()\n    spoken_helpers.N_CALLS += 1\n    return inner, os.sep, torch.ones\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import spoken_model

    yield spoken_model
    for name in ("spoken_model", "spoken_helpers"):
        del sys.modules[name]


def test_only_what_the_code_uses_is_spoken_of(files: ModuleType) -> None:
    spoken = {(file["__name__"], name) for file, name in referenced_names(files.forward)}
    own = {("spoken_model", name) for name in ("OWN", "spoken_helpers", "os", "torch")}
    assert spoken == own | {("spoken_helpers", "bump"), ("spoken_helpers", "N_CALLS")}


def test_functions_within_are_read_too(files: ModuleType) -> None:
    assert {"OWN", "sep", "N_CALLS"} <= set(names_in(files.forward.__code__))


def test_installed_packages_have_another_author(files: ModuleType) -> None:
    assert is_of_author(files) and is_of_author(files.forward)
    assert not any(map(is_of_author, (sys, torch, pytest, torch.nn.Linear, pytest.raises, names_in)))
