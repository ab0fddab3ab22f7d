"""Files of other programs as timelines: what frames say, what a profiler's trace says, and how damage ends."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from explorer.errors import UnreadableFile
from explorer.jobs import run_file
from explorer.plan.card.allocator_options import MIB
from explorer.plan.card.frames import MODULE_FILE, Scene, scene_of
from explorer.plan.card.opened import is_history, open_history, read_history
from explorer.plan.card.snapshot import StackFrame
from explorer.plan.memory.ledger import ledger
from explorer.record.history import MemoryHistory
from explorer.record.measurement import Measurement
from tests.hostile import Touch
from tests.plan.card.histories import BASE, framed_document, small_document

SITE = "/env/lib/python3.11/site-packages/torch"
CALL = StackFrame(f"{SITE}/nn/modules/module.py", 1790, "_call_impl")
WRAPPED = StackFrame(f"{SITE}/nn/modules/module.py", 1780, "_wrapped_call_impl")
LINEAR = StackFrame(f"{SITE}/nn/modules/linear.py", 125, "forward")
BLOCK = StackFrame("/home/a/gpt/block.py", 31, "forward")
STEP = StackFrame("/home/a/train.py", 7, "step")
RERUN = StackFrame(f"{SITE}/utils/checkpoint.py", 1157, "unpack_hook")
ENGINE = StackFrame("??", 0, "torch::autograd::Engine::evaluate_function(...)")


def opened(document: Any) -> Measurement:
    (run,) = open_history(pickle.dumps(document), "a.pickle").runs
    return run


@pytest.mark.parametrize(
    ("stack", "scene"),
    [
        ((LINEAR, CALL, BLOCK, CALL, WRAPPED, STEP), Scene("forward", "block:31.linear", "gpt/block.py:31 forward")),
        ((LINEAR, CALL, BLOCK, CALL, RERUN, ENGINE), Scene("recompute", "block:31.linear", "gpt/block.py:31 forward")),
        ((StackFrame("??", 0, "c10::alloc()"), ENGINE), Scene("backward", "", "")),
        ((StackFrame(f"{SITE}/_tensor.py", 5, "backward"), STEP), Scene("backward", "", "a/train.py:7 step")),
        ((StackFrame(f"{SITE}/optim/adamw.py", 5, "step"), STEP), Scene("optimizer", "", "a/train.py:7 step")),
        ((STEP,), Scene("between", "", "a/train.py:7 step")),
        ((), Scene(None, "", "")),
        ((StackFrame("", 0, "aten::mm"), StackFrame(MODULE_FILE, 0, "GPT_0")), Scene("forward", "GPT_0", "aten::mm")),
        ((StackFrame("", 0, "aten::mm"),), Scene("forward", "", "aten::mm")),
        # the reentrant form: backward inside of the recompute's function
        (
            (ENGINE, StackFrame(f"{SITE}/utils/checkpoint.py", 300, "backward")), Scene("backward", "", "")
        ),
    ],
)  # fmt: skip
def test_the_innermost_frame_that_says_a_phase_counts(stack: tuple[StackFrame, ...], scene: Scene) -> None:
    assert scene_of(stack) == scene


def test_a_snapshot_with_frames_is_a_timeline() -> None:
    run = opened(framed_document())
    at = ledger(run)
    assert [span.phase for span in run.phases] == ["forward", "backward", "recompute", "optimizer"]
    assert at.total_bytes == run.held_peak_bytes == 12 * MIB
    assert at.by_block == {"block:31.linear": 9 * MIB, "": 3 * MIB}
    log = run.allocations
    assert log is not None and set(log.ops) == {"", "gpt/block.py:31 forward", "a/train.py:7 step"}
    assert list(log.time_ns) == [0, 0, 5000, 9000, 12000, 12000, 15000]
    assert run.peaks.reserved is not None and max(run.peaks.reserved) == 20 * MIB


def test_a_snapshot_without_times_or_frames_opens() -> None:
    """As in 2023: no times. Without frames nothing is known of phases."""
    document = framed_document()
    for entry in document["device_traces"][0]:
        del entry["time_us"]
    run = opened(document)
    assert run.allocations is not None and not run.allocations.time_ns and len(run.phases) == 4
    plain = opened(small_document())
    assert plain.phases == () and plain.held_peak_bytes == 4 * MIB


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.two, self.one(x), use_reentrant=False)
        return y


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step on the CPU as torch's profiler writes it."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    with torch.profiler.profile(profile_memory=True, with_stack=True) as profile:
        net(torch.randn(32, 16)).sum().backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("trace") / "step.json"
    profile.export_chrome_trace(str(path))
    return path


def test_a_trace_of_the_profiler_is_a_timeline(profiled: Path) -> None:
    history = read_history(profiled)
    (run,), (device,) = history.runs, history.devices
    assert (device.label, history.source, device.reserved_bytes) == ("CPU", "profiler trace", None)
    phases = [span.phase for span in run.phases]
    assert {"forward", "recompute", "backward", "optimizer"} <= set(phases)
    assert phases.index("forward") < phases.index("recompute") < phases.index("optimizer")
    log = run.allocations
    assert log is not None and {"Net_0.Linear_0", "Net_0.Linear_1"} <= set(log.blocks)
    assert any(op.startswith("card/test_opened.py:") for op in log.ops)
    # Second method: the profiler's own total, from which the blocks before the trace are missing.
    memory = [event["args"] for event in json.loads(profiled.read_text())["traceEvents"] if event["name"] == "[memory]"]
    before = memory[0]["Total Allocated"] - memory[0]["Bytes"]
    older = sum(size for size, born in zip(log.n_bytes, log.born) if not born)
    assert run.held_peak_bytes == device.requested_bytes
    assert device.requested_bytes == max(entry["Total Allocated"] for entry in memory) - before + older
    packed = gzip.compress(profiled.read_bytes())
    assert is_history(packed[:64]) and open_history(packed, "step.json").runs == history.runs


def memory_event(n_bytes: int, address: int, time_us: float, **more: Any) -> dict[str, Any]:
    totals = {"Total Allocated": 1, "Total Reserved": 20 * MIB}
    args = {"Bytes": n_bytes, "Addr": address, "Device Type": 1, "Device Id": 0, **totals, **more}
    return {"ph": "i", "name": "[memory]", "pid": 1, "tid": 2, "ts": time_us, "args": args}


def gpu_trace() -> dict[str, Any]:
    """An older block is freed, one of 3 MiB lives on, and a request is refused."""
    refused = memory_event(-(30 * MIB), 0, 4.0, **{"Total Allocated": 3 * MIB})
    refused["name"] = "[OutOfMemory]"
    return {
        "traceEvents": [
            memory_event(3 * MIB, BASE, 3.0, **{"Total Allocated": 3 * MIB}),
            memory_event(-(2 * MIB), BASE + 4 * MIB, 1.0, **{"Total Allocated": 0}),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 2.0, "dur": 1.5},
            refused,
        ]
    }


def test_a_gpu_in_a_trace_has_the_allocators_totals() -> None:
    history = open_history(json.dumps(gpu_trace()).encode(), "gpu.json")
    (device,), (run,) = history.devices, history.runs
    assert (device.label, device.allocated_bytes, device.stranded_bytes) == ("GPU 0", 3 * MIB, 17 * MIB)
    assert device.requested_bytes is None and run.held_peak_bytes == 3 * MIB
    assert device.simulated[0].reserved_bytes == 20 * MIB
    (refused,) = device.refused
    assert (refused.n_bytes, refused.allocated_bytes, refused.driver_free_bytes) == (30 * MIB, 3 * MIB, None)
    assert run.allocations is not None and "aten::mm" in run.allocations.ops


def slice_event(name: str, begin_us: float, us: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": begin_us, "dur": us}


@pytest.mark.parametrize(
    ("time_us", "op"), [(1.0, ""), (2.0, "aten::mm"), (3.0, "aten::mm"), (3.5, "aten::mm"), (4.0, "")]
)
def test_a_request_at_the_begin_or_the_end_of_a_slice_is_inside(time_us: float, op: str) -> None:
    trace = {"traceEvents": [slice_event("aten::mm", 2.0, 1.5), memory_event(3 * MIB, BASE, time_us)]}
    (run,) = open_history(json.dumps(trace).encode(), "gpu.json").runs
    log = run.allocations
    assert log is not None and [log.ops[number] for number in log.op] == [op]


@pytest.mark.parametrize("n_deeper", [0, 1])
def test_the_200_outermost_slices_are_a_stack(n_deeper: int) -> None:
    n = 199 + n_deeper
    slices = [slice_event(f"outer_{i}", float(i), 1000.0 - 2 * i) for i in range(n)]
    slices.append(slice_event("aten::mm", 300.0, 10.0))
    (run,) = open_history(json.dumps({"traceEvents": [*slices, memory_event(1, BASE, 305.0)]}).encode(), "a.json").runs
    log = run.allocations
    assert log is not None and log.ops[log.op[0]] == ("outer_199" if n_deeper else "aten::mm")


@pytest.mark.parametrize(
    ("name", "value", "opens"),
    [
        ("ts", 1e15 - 1, True), ("ts", 1e15, False), ("Addr", (1 << 62) - 1, None), ("Device Type", 255, True),
        ("Device Type", 256, False), ("Device Id", -1, True), ("Device Id", -2, False), ("Device Id", 65535, True),
        ("Device Id", 65536, False), ("Total Reserved", 0, True), ("Total Reserved", -1, False),
    ],
)  # fmt: skip
def test_numbers_of_a_trace_have_bounds(name: str, value: float, opens: bool | None) -> None:
    trace = {"traceEvents": [memory_event(3 * MIB, BASE, 3.0)]}
    event = trace["traceEvents"][0]
    (event["args"] if name in event["args"] else event)[name] = value
    data = json.dumps(trace).encode()
    if opens:
        assert open_history(data, "a.json").devices
    elif opens is not None:
        with pytest.raises(UnreadableFile, match="out of range"):
            open_history(data, "a.json")


def test_a_history_is_stored_and_comes_back() -> None:
    history = open_history(pickle.dumps(framed_document()), "a.pickle")
    stored = run_file.read(run_file.write(run_file.stored_record(history)))
    assert stored.kind == "memory history" and stored.name == "a.pickle cuda, recorded"
    assert run_file.from_msgpack(stored.record, MemoryHistory) == history
    assert history.headlines()["reserved_bytes"] == 20 * MIB


def altered(number: int, name: str, value: Any) -> dict[str, Any]:
    trace = gpu_trace()
    event = trace["traceEvents"][number]
    (event["args"] if name in event.get("args", ()) else event)[name] = value
    return trace


HOSTILE = [
    b"", b"{", b"[]", b"{}", b'{"traceEvents": 3}', b'{"traceEvents": [3]}', b'{"traceEvents": []}',
    b'{"traceEvents": [{"name": "[memory]"}]}', b"[" * 100_000, b'{"a":' * 100_000, b"\x1f\x8bnot gzip",
    gzip.compress(b"{}", mtime=0)[:-9], b"\x00" * 64, b'{"traceEvents": [{"name": "[memory]", "ts": NaN, "args": {}}]}',
    *(
        json.dumps(altered(0, name, value)).encode()
        for name, value in {
            "ts": 1e300, "Bytes": 1 << 70, "Addr": -1, "Total Reserved": 1.5, "Device Type": "cuda",
            "Device Id": 1 << 40, "args": [], "name": 3,
        }.items()
    ),
    json.dumps(altered(0, "ts", -1.0)).encode(),
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[:24]))
def test_hostile_traces_are_one_sentence(data: bytes) -> None:
    with pytest.raises(UnreadableFile) as error:
        open_history(data, "a.json")
    assert len(error.value.sentence) < 400 and "\n" not in error.value.sentence


DAMAGED = [pickle.dumps(framed_document()), json.dumps(gpu_trace()).encode(), pickle.dumps({"x": Touch(Path("mark"))})]


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_damaged_files_open_or_end_in_one_sentence(data: st.DataObject) -> None:
    file = bytearray(data.draw(st.sampled_from(DAMAGED)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(file) - 1))
        file[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        history = open_history(bytes(file), "a")
        run_file.read(run_file.write(run_file.stored_record(history)))
    except UnreadableFile as error:
        assert len(error.sentence) < 400 and "\n" not in error.sentence


def test_a_packed_trace_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explorer.plan.card.opened.LARGEST_BYTES", 1 << 16)
    with pytest.raises(UnreadableFile, match="more than"):
        open_history(gzip.compress(b" " * (1 << 20)), "a.json.gz")
