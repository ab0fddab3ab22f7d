"""A memory history from a file of another program: a snapshot of torch's allocator, or a trace of torch's profiler.

`snapshot.py` reads snapshots. Traces (Chrome's JSON, also packed by gzip) are read here, without torch:
`profile(profile_memory=True)` writes each allocation and free as an instant `[memory]`, with the address, the bytes and
the allocator's totals. Sizes on a GPU are those of blocks. The slices around an event in its thread are its stack:
Python functions and modules (`with_stack`, `with_modules`), operators, and the profiler's ranges.
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from explorer.errors import UnreadableFile, message_of
from explorer.plan.card.allocator_options import OTHER_OPTIONS, parse_options
from explorer.plan.card.caching_allocator import CachingAllocator
from explorer.plan.card.frames import CPU_LABEL, MODULE_FILE, HistoryMove, Movements, timeline_of
from explorer.plan.card.history import DeviceStart, device_history, simulated
from explorer.plan.card.snapshot import (
    LARGEST_BYTES,
    LONGEST_NAME,
    MOST_BYTES,
    PICKLE_HEAD,
    SnapshotBlock,
    Stack,
    StackFrame,
    Stacks,
    snapshot_of,
)
from explorer.record.bounded_file import GZIP, read_file, unpack
from explorer.record.history import DeviceHistory, MemoryHistory, RefusedInHistory, SimulatedHistory
from explorer.record.sound import unsound

SUFFIXES = ("pickle", "pkl", "json", "gz")
"""Ends of the names of such files."""
GZIP_HEAD = b"\x1f\x8b"
MEMORY, REFUSAL = "[memory]", "[OutOfMemory]"
SLICES = ("python_function", "cpu_op", "user_annotation")
LATEST_US = 1e15
CPU = 0
"""torch's number of the CPU among the kinds of devices."""
MOST_SMALL_OBJECTS = 100_000
MOST_OBJECTS = 4_000_000
LEAST_OBJECT_BYTES = 32
"""An event with its arguments is two objects in 200 bytes of a trace. An empty object takes three bytes, and 150 of
memory."""
MOST_FRAMES = 200
"""Deeper slices are left out of a stack."""
_PYTHON = re.compile(r"(?P<file>.*)\((?P<line>\d{1,9})\): (?P<name>.*)", re.DOTALL)
_MODULE = "nn.Module: "


def is_history(head: bytes) -> bool:
    """Whether a file that begins so can be a history: a pickle, JSON, or JSON packed by gzip."""
    return head[:1] == PICKLE_HEAD or head[:2] == GZIP_HEAD or head.lstrip()[:1] in (b"{", b"[")


def read_history(path: Path) -> MemoryHistory:
    """The history in a file. Raises UnreadableFile."""
    return open_history(read_file(path, LARGEST_BYTES, hint="Record fewer events."), path.name)


def open_history(data: bytes, name: str) -> MemoryHistory:
    """The history in the bytes of a file of this name. Raises UnreadableFile."""
    was_enabled = gc.isenabled()
    gc.disable()  # a file of millions of small objects without cycles: a third of the time is the collector's
    try:
        return _opened(data, name)
    finally:
        if was_enabled:
            gc.enable()


def _opened(data: bytes, name: str) -> MemoryHistory:
    if len(data) > LARGEST_BYTES:
        raise UnreadableFile(f"{name} has more than {LARGEST_BYTES >> 20} MiB.", hint="Record fewer events.")
    is_snapshot = data[:1] == PICKLE_HEAD
    if is_snapshot:
        snapshot = snapshot_of(data, name)
        devices = [device_history(device, snapshot.options) for device in snapshot.devices]
        stacks = snapshot.stacks
    else:
        devices, stacks = read_trace_file(data, name)
    runs = tuple(timeline_of(movements, stacks, name, figures.label) for figures, movements in devices)
    history = MemoryHistory(
        file=name,
        source="memory snapshot" if is_snapshot else "profiler trace",
        devices=tuple(
            replace(figures, requested_bytes=run.held_peak_bytes) if figures.name == CPU_LABEL else figures
            for (figures, _), run in zip(devices, runs)
        ),
        runs=runs,
    )
    if not devices:
        raise UnreadableFile(f"{name} has neither segments nor events.", hint="Record before the first step.")
    if fault := unsound(history):
        raise UnreadableFile(f"{name} holds no history that can have happened: {fault}.", hint="Record it again.")
    return history


class _Event(msgspec.Struct):
    ph: str = ""
    name: str = ""
    cat: str = ""
    tid: int | str = 0
    pid: int | str = 0
    ts: float = 0
    dur: float = 0
    args: msgspec.Raw = msgspec.Raw()


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


class _Memory(msgspec.Struct):
    bytes: int = msgspec.field(name="Bytes")
    kind: int = msgspec.field(name="Device Type")
    device: int = msgspec.field(name="Device Id")
    address: int = msgspec.field(name="Addr", default=0)
    allocated: int = msgspec.field(name="Total Allocated", default=0)
    reserved: int = msgspec.field(name="Total Reserved", default=0)

    def __post_init__(self) -> None:
        numbers = (abs(self.bytes), self.address, self.allocated, self.reserved)
        if max(numbers) >= MOST_BYTES or min(numbers) < 0 or not 0 <= self.kind < 256 or not -1 <= self.device < 65536:
            raise ValueError("a memory event has a number out of range")


def read_trace_file(data: bytes, name: str) -> tuple[list[tuple[DeviceHistory, Movements]], tuple[Stack, ...]]:
    """The devices in the bytes of a trace, and the stacks that their moves name. Raises UnreadableFile."""
    try:
        events = msgspec.json.decode(_bounded(data, name), type=_Trace).events
        moments = [event for event in events if event.name in (MEMORY, REFUSAL)]
        memory = [(event, msgspec.json.decode(event.args, type=_Memory)) for event in moments]
        if not all(0 <= event.ts < LATEST_US for event, _ in memory):
            raise ValueError("a memory event has a time out of range")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableFile(
            f"{name} is no trace of torch.profiler: {message_of(error)}.",
            hint="Write it with export_chrome_trace, from a profile with profile_memory=True.",
        ) from error
    if not memory:
        raise UnreadableFile(f"{name} is a trace without memory events.", hint="Profile with profile_memory=True.")
    memory.sort(key=lambda pair: pair[0].ts)
    stacks = Stacks()
    stack_of = _stacks_of(events, [event for event, _ in memory], stacks)
    devices: dict[tuple[int, int], list[tuple[_Event, _Memory]]] = defaultdict(list)
    for event, entry in memory:
        devices[entry.kind, entry.device].append((event, entry))
    return [_device(devices[key], stack_of) for key in sorted(devices)], tuple(stacks.stacks)


def _bounded(data: bytes, name: str) -> bytes | bytearray:
    """The JSON of a trace. Raises UnreadableFile for one whose events would take far more memory than its bytes."""
    text = unpack(data, LARGEST_BYTES, name, wbits=GZIP) if data[:2] == GZIP_HEAD else data
    most = min(MOST_OBJECTS, MOST_SMALL_OBJECTS + len(text) // LEAST_OBJECT_BYTES)
    if text.count(b"{") > most:
        raise UnreadableFile(f"{name} has more than {most:,} events, the most that are read.", hint="Profile less.")
    return text


def _stacks_of(events: Sequence[_Event], memory: Sequence[_Event], stacks: Stacks) -> dict[int, int]:
    """Number of the stack of each memory event, by the event's id: the slices of its thread that are open then."""
    slices = _by_thread(event for event in events if event.ph == "X" and event.cat in SLICES)
    numbers: dict[int, int] = {}
    for thread, instants in _by_thread(memory).items():
        in_order = sorted(slices[thread], key=lambda event: (event.ts, -event.dur))
        for event, stack in _open_slices(in_order, instants):
            numbers[id(event)] = stacks.add(stack)
    return numbers


def _by_thread(events: Iterable[_Event]) -> defaultdict[tuple[int | str, int | str], list[_Event]]:
    threads: defaultdict[tuple[int | str, int | str], list[_Event]] = defaultdict(list)
    for event in events:
        threads[event.pid, event.tid].append(event)
    return threads


def _open_slices(slices: Sequence[_Event], instants: Sequence[_Event]) -> Iterator[tuple[_Event, Stack]]:
    """Each instant with its stack; both lists are in order of time."""
    at = 0
    ends: list[float] = []
    stacks: list[Stack] = [()]
    for event in instants:
        while at < len(slices) and slices[at].ts <= event.ts:
            begun = slices[at]
            _close(ends, stacks, begun.ts)
            if len(ends) < MOST_FRAMES:
                ends.append(begun.ts + begun.dur)
                stacks.append((_frame(begun), *stacks[-1]))
            at += 1
        _close(ends, stacks, event.ts)
        yield event, stacks[-1]


def _close(ends: list[float], stacks: list[Stack], time_us: float) -> None:
    while ends and ends[-1] < time_us:
        ends.pop()
        stacks.pop()


def _frame(event: _Event) -> StackFrame:
    name = event.name[:LONGEST_NAME]
    if name.startswith(_MODULE):
        return StackFrame(MODULE_FILE, 0, name.removeprefix(_MODULE))
    if event.cat == "python_function" and (match := _PYTHON.fullmatch(name)):
        return StackFrame(match["file"], int(match["line"]), match["name"])
    return StackFrame("", 0, name)


def _device(entries: Sequence[tuple[_Event, _Memory]], stack_of: dict[int, int]) -> tuple[DeviceHistory, Movements]:
    """The figures of a device. Only an allocator of a GPU has totals of its own."""
    first = entries[0][1]
    moved = Movements()
    refused = []
    for event, entry in entries:
        if event.name == REFUSAL:
            refused.append(
                RefusedInHistory(
                    event=len(moved.moves),
                    n_bytes=abs(entry.bytes),
                    allocated_bytes=entry.allocated,
                    reserved_bytes=entry.reserved,
                )
            )
        elif entry.bytes:
            if not moved.moves:
                moved.allocated.append(max(0, entry.allocated - entry.bytes))
                moved.reserved.append(entry.reserved)
            moved.moves.append(HistoryMove(entry.address, entry.bytes, stack_of.get(id(event), 0), event.ts))
            moved.allocated.append(entry.allocated)
            moved.reserved.append(entry.reserved)
    number = max(0, first.device)
    history = DeviceHistory(device=number, name=CPU_LABEL, n_events=len(moved.moves), refused=tuple(refused))
    if first.kind == CPU:
        return history, Movements(moves=moved.moves)
    gpu = replace(
        history,
        name=f"GPU {number}",
        first_reserved_bytes=next(iter(moved.reserved), 0),
        allocated_bytes=max(moved.allocated, default=0),
        reserved_bytes=max(moved.reserved, default=0),
        simulated=_simulations(moved),
    )
    return gpu, moved


def _simulations(moved: Movements) -> tuple[SimulatedHistory, ...]:
    """The same blocks under other options. A block that is freed before it was requested is older than the trace."""
    events: list[tuple[str, int, int, int]] = []
    older: dict[int, SnapshotBlock] = {}
    requested: set[int] = set()
    for address, n_bytes, *_ in moved.moves:
        events.append(("alloc" if n_bytes > 0 else "free_completed", address, abs(n_bytes), 0))
        if n_bytes > 0:
            requested.add(address)
        elif address not in requested:
            older[address] = SnapshotBlock(address=address, n_bytes=-n_bytes, request_bytes=-n_bytes, stream=0)
    start = DeviceStart(reserved_bytes=0, segments={}, blocks=older)
    return tuple(
        simulated(events, start, CachingAllocator(options=parse_options(text)), text) for text in ("", *OTHER_OPTIONS)
    )
