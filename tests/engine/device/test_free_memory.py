"""What the machine and the container leave to a run, and that a run which wants more fails by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from explorer.engine.device import free_memory, limits
from explorer.engine.device.free_memory import available_bytes
from explorer.engine.device.limits import limited_by_machine
from explorer.errors import OutOfMemory

MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal:  4096 kB\nMemAvailable:  2048 kB\n")
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    return tmp_path


def test_without_a_container_the_machine_says(machine: Path) -> None:
    assert available_bytes() == 2 * MIB
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("1000\n")
    assert available_bytes() == 2 * MIB


def test_a_container_may_have_less_and_its_file_cache_counts_as_free(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{MIB}\n")
    (machine / "memory.current").write_text(f"{MIB}\n")
    (machine / "memory.stat").write_text("anon 5\ninactive_file 4096\n")
    assert available_bytes() == 4096


def test_where_nobody_says_it_is_unknown(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert available_bytes() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="no limit on a machine with a GPU: CUDA maps address space")
def test_a_run_that_wants_more_than_the_machine_has_fails_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda: 256 * MIB)
    with pytest.raises(OutOfMemory, match="asked for 1,073,741,824 bytes and was") as caught, limited_by_machine():
        torch.empty(1024 * MIB, dtype=torch.uint8)
    assert caught.value.asked_bytes == 1024 * MIB
    assert caught.value.free_bytes is not None and 0 < caught.value.free_bytes <= 256 * MIB
    torch.empty(1024 * MIB, dtype=torch.uint8)  # the limit is gone with the run


def test_a_machine_that_says_nothing_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda: None)
    with limited_by_machine():
        assert torch.empty(256 * MIB, dtype=torch.uint8).numel() == 256 * MIB
