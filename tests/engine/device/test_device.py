"""Clocks, ranks, and the CUDA side of the edge, with torch.cuda as its sources document it: no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from explorer.engine.device import device as edge
from explorer.engine.device.device import CpuClock, CudaDevice, current_rank, path_of_rank, rank_text
from explorer.engine.device.memory_limit import cuda_memory_limit

GPU = torch.device("cuda", 0)
GIB = 2**30


def test_the_environment_says_what_a_gpu_run_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n")
    monkeypatch.setattr(edge, "DRIVER", version)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="made up", total_memory=80 * GIB)
    )
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    environment = CudaDevice(GPU).environment(1)
    assert (environment.cuda_version, environment.cudnn_version, environment.driver_version) == (
        "12.8",
        "91002",
        "550.54.15",
    )
    assert environment.tf32 == ("convolutions", "recurrent layers")
    assert environment.allocator_settings == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    version.unlink()
    assert CudaDevice(GPU).environment(1).driver_version == ""


def test_a_gpu_that_an_assertion_has_spoilt_is_left_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "empty_cache", dead)
    CudaDevice(GPU).release()


@pytest.mark.parametrize(("reserved", "emptied"), [(3 * GIB, 0), (5 * GIB, 1)])
def test_a_limit_leaves_the_cache_that_fits(monkeypatch: pytest.MonkeyPatch, reserved: int, emptied: int) -> None:
    """A timed step that begins with an empty cache is a step of cudaMalloc."""
    emptyings: list[str] = []
    fractions: list[float] = []
    fakes = {
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
        "get_per_process_memory_fraction": lambda device: 1.0,
        "set_per_process_memory_fraction": lambda share, device: fractions.append(share),
        "memory_reserved": lambda device: reserved,
        "empty_cache": lambda: emptyings.append("emptied"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with cuda_memory_limit(4 * GIB, GPU):
        pass
    assert len(emptyings) == emptied and fractions == [0.05, 1.0]


def test_cpu_time_is_in_milliseconds() -> None:
    assert CpuClock().between_ms(1_000_000, 3_500_000) == 2.5
    clock = CpuClock()
    assert clock.mark() <= clock.mark()


@pytest.mark.parametrize(
    ("rank", "world", "expected"), [(None, None, None), ("0", "1", None), ("0", "4", (0, 4)), ("3", "4", (3, 4))]
)
def test_only_one_of_several_has_a_rank(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, world: str | None, expected: tuple[int, int] | None
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert current_rank() == expected


def test_files_and_words_name_the_rank_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("runs/oom.explorer")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (path_of_rank(path), rank_text()) == (path, "")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert (path_of_rank(path), rank_text()) == (Path("runs/oom.rank3.explorer"), ", rank 3")
