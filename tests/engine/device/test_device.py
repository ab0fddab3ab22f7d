"""The edge of a device: clocks, ranks, CUDA as its sources document it, child processes, models without memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from explorer.engine.device import device as edge
from explorer.engine.device.device import CpuClock, CudaDevice, current_rank, path_of_rank, rank_text
from explorer.engine.device.memory_limit import cuda_memory_limit, refusal_of
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.device.without_data import cast_buffers, explained, is_without_data, without_data
from explorer.errors import BadInput, Cancelled, Crashed, ModelFailed, OutOfMemory
from explorer.record.plan import Progress, Report, silent

GPU = torch.device("cuda", 0)
GIB = 2**30


def test_the_environment_says_what_a_gpu_run_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n")
    monkeypatch.setattr(edge, "DRIVER", version)
    made_up = SimpleNamespace(name="made up", total_memory=80 * GIB, major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made_up)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    environment = CudaDevice(GPU).environment(1)
    assert (environment.cuda_version, environment.cudnn_version, environment.driver_version) == (
        "12.8",
        "91002",
        "550.54.15",
    )
    assert environment.tf32 == ("convolutions", "recurrent layers")
    settings = "PYTORCH_ALLOC_CONF=expandable_segments:True CUBLAS_WORKSPACE_CONFIG=:4096:8"
    assert (environment.allocator_settings, environment.capability) == (settings, "8.9")
    version.unlink()
    assert CudaDevice(GPU).environment(1).driver_version == ""


def test_a_gpu_that_an_assertion_has_spoilt_is_left_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "empty_cache", dead)
    CudaDevice(GPU).release()


@pytest.mark.parametrize(("reserved", "emptied"), [(3 * GIB, 0), (5 * GIB, 1)])
def test_a_limit_leaves_the_cache_that_fits_and_says_what_it_left_free(
    monkeypatch: pytest.MonkeyPatch, reserved: int, emptied: int
) -> None:
    """A timed step that begins with an empty cache is a step of cudaMalloc. No GPU took part."""
    emptyings: list[str] = []
    fractions: list[float] = []
    fakes = {
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
        "get_per_process_memory_fraction": lambda device: 0.7,
        "set_per_process_memory_fraction": lambda share, device: fractions.append(share),
        "memory_reserved": lambda device: reserved,
        "empty_cache": lambda: emptyings.append("emptied"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    words = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 80 GiB of which 70.00 GiB is free."
    with pytest.raises(OutOfMemory) as caught, cuda_memory_limit(4 * GIB, GPU):
        raise torch.OutOfMemoryError(words)
    assert len(emptyings) == emptied and fractions == [0.05, 0.7]
    assert (caught.value.asked_bytes, caught.value.free_bytes) == (2 * GIB, max(0, 4 * GIB - reserved))
    assert refusal_of(torch.OutOfMemoryError(words)).free_bytes == 70 * GIB


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
    assert path_of_rank(path_of_rank(path)) == path_of_rank(path)


def counts(up_to: int, report: Report) -> tuple[int, int]:
    for number in range(up_to):
        report(Progress(what="counting", done=number, total=up_to))
    return os.getpid(), sum(range(up_to))


def refuses(why: str, report: Report) -> None:
    raise BadInput(f"This cannot be done: {why}.", hint="Ask for less.")


def dies(report: Report) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def stays(report: Report) -> None:
    signal.pause()


def test_it_runs_elsewhere_and_what_it_says_and_returns_arrives() -> None:
    heard: list[Progress] = []
    answer = call_in_subprocess(counts, 4, report=heard.append, what="counts")
    assert answer[0] != os.getpid() and answer[1] == 6
    counted = [progress.done for progress in heard if progress.what == "counting"]
    assert list(dict.fromkeys(counted)) == [0, 1, 2, 3]


def test_what_it_refuses_is_refused_here_with_its_hint() -> None:
    with pytest.raises(BadInput, match="cannot be done: too large") as refused:
        call_in_subprocess(refuses, "too large", report=silent, what="asks")
    assert refused.value.hint == "Ask for less."


def test_an_end_without_an_answer_says_what_it_did_and_how_it_ended() -> None:
    with pytest.raises(Crashed, match="The run that breaks ended the process by SIGSEGV"):
        call_in_subprocess(dies, report=silent, what="breaks")


def test_whoever_listens_may_end_it() -> None:
    def cancel(progress: Progress) -> None:
        raise Cancelled("Cancelled.")

    with pytest.raises(Cancelled):
        call_in_subprocess(stays, report=cancel, what="waits")


def test_a_model_of_a_tebibyte_is_built_and_run() -> None:
    with without_data():
        model = nn.Sequential(*(nn.Linear(2**17, 2**17, bias=False) for _ in range(2**4)))
        result = model(torch.ones(1, 2**17))
        assert is_without_data()
    assert sum(parameter.nbytes for parameter in model.parameters()) == 2**40
    assert is_fake(model[0].weight) and is_fake(result) and result.shape == (1, 2**17)
    assert not is_without_data() and not is_fake(nn.Linear(2, 2).weight)


def test_a_model_without_data_is_converted_by_its_factory() -> None:
    with without_data():
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        net[2].weight = net[0].weight
        net = net.bfloat16().double()
        assert {tensor.dtype for tensor in net.state_dict().values()} == {torch.float64, torch.int64}
        assert net[2].weight is net[0].weight and is_fake(net[0].weight) and net[0].weight.requires_grad
    assert nn.Linear(2, 2).half().weight.dtype is torch.float16


def test_types_are_those_asked_for_and_buffers_stay_real() -> None:
    def half(dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if dtype.is_floating_point else dtype

    with without_data(half):
        norm = nn.BatchNorm1d(4)
        cast_buffers(norm, half)
    assert norm.weight.dtype == norm.running_mean.dtype == torch.bfloat16
    assert norm.num_batches_tracked.dtype == torch.int64 and not is_fake(norm.running_mean)


def test_torch_is_as_it_was_after_a_model_that_raises() -> None:
    registered, truncated = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_
    with pytest.raises(ValueError), without_data():
        nn.init.trunc_normal_(nn.Linear(2, 2).weight)
        raise ValueError
    assert nn.Module.register_parameter is registered and nn.init._no_grad_trunc_normal_ is truncated


def test_a_decision_by_data_is_refused_in_a_sentence() -> None:
    with pytest.raises(ModelFailed, match=r"net\.py cannot be predicted without its data"), without_data():
        layer = nn.Linear(2, 2)
        with explained("net.py"):
            layer(torch.ones(1, 2)).sum().item()
    with pytest.raises(ModelFailed, match="such as a sparse one"), without_data(), explained("net.py"):
        torch.sparse.mm(torch.eye(2).to_sparse(), nn.Linear(2, 2).weight).sum().backward()


def test_a_lazy_layer_gets_its_shapes_from_a_forward() -> None:
    with without_data():
        layer = nn.LazyLinear(3)
        assert layer(torch.ones(1, 2)).shape == (1, 3) and layer.weight.shape == (3, 2)


def test_a_model_that_splits_itself_is_told_who_splits_it_and_other_errors_pass() -> None:
    words = "net.py is split by its own code, which called torch.distributed without a process group"
    with pytest.raises(ModelFailed, match=words) as failed, explained("net.py"):
        torch.distributed.all_reduce(torch.ones(1))
    assert "--fsdp" in failed.value.hint
    with pytest.raises(ValueError, match="its own"), explained("net.py"):
        raise ValueError("its own")
