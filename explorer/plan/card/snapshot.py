"""The file that `torch.cuda.memory._dump_snapshot` writes, read without torch and without trust.

A pickle can run code. Two checks stand before its first object: the file's opcodes are read without being carried
out, and only those of numbers, strings, lists and dicts pass; then an unpickler that admits no class builds them.
Every field that is used is checked: the rest of the tool sees `Snapshot`, plain numbers.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from explorer.errors import UnreadableFile, message_of
from explorer.plan.card.allocator_options import N_DIVISIONS, AllocatorOptions
from explorer.record.base import Record

LARGEST_BYTES = 512 << 20
MOST_BYTES = 1 << 62
LONGEST_NAME = 300
LEAST_ENTRY_BYTES = 8
"""An event or block takes more of a file. Lists that name one entry many times are refused by it."""
LEAST_CONTAINER_BYTES = 10
MOST_SMALL_CONTAINERS = 100_000
"""A list or dict of torch takes 20 bytes of a file on average. An empty one takes one byte, and 64 of memory."""
PICKLE_HEAD = b"\x80"
NO_MEMORY_MOVED = {"snapshot", "user_defined"}
ACTIONS = {"alloc", "free_requested", "free_completed", "oom", *NO_MEMORY_MOVED}
ACTIONS |= {f"segment_{change}" for change in ("alloc", "free", "map", "unmap")}
DAMAGE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, MemoryError
)  # fmt: skip
"""What an unpickler raises about bytes that no pickler wrote."""
_HINT = "Write it with torch.cuda.memory._dump_snapshot, and record with torch.cuda.memory._record_memory_history."
USED = ("active_allocated", "active_pending_free", "active_awaiting_free")

# Opcodes of protocols 2 to 5 with their arguments. A pickler opens a frame between any two opcodes. A tuple holds two
# numbers: nested tuples overflow the stack when they are hashed. Not in here: strings and LONG_BINPUT, whose arguments
# need a look.
_FRAME = rb"\x95.{8}"
_NUMBER = rb"(?:K.|M..|J....|\x8a(?:\x08.{8}|\x06.{6}|\x05.{5}|\x00|\x01.|\x02..|\x03...|\x04....|\x07.{7}|\x09.{9}))"
_PAIR = b"%b(?:%b)*%b(?:%b)*\x86" % (_NUMBER, _FRAME, _NUMBER, _FRAME)
_OTHER = rb"[}\])(\x94esuaN\x88\x89]|[hq].|j....|G.{8}"
_PLAIN = re.compile(b"(?:%b|%b|%b|%b)*+" % (_OTHER, _PAIR, _NUMBER, _FRAME), re.DOTALL)
_SHORT_STRING, _STRING, _PUT, _STOP = 0x8C, ord("X"), ord("r"), ord(".")


class StackFrame(NamedTuple):
    """A line of code that was running."""

    file: str
    line: int
    name: str


Stack = tuple[StackFrame, ...]


HistoryEvent = tuple[str, int, int, int]
"""(action, address, bytes, stream); an `oom` has the driver's free bytes in place of an address."""


class SnapshotSegment(Record):
    """Memory taken from the driver. Of an expandable segment: a stretch with memory behind it."""

    address: int
    n_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool = False


class SnapshotBlock(Record):
    """A block in use."""

    address: int
    n_bytes: int
    request_bytes: int
    stream: int
    is_freed: bool = False
    """Whether its free is requested: the block waits for another stream, and counts as allocated no more."""
    stack: int = 0
    """Where it was requested: index into `Snapshot.stacks`."""


@dataclass(frozen=True, kw_only=True)
class DeviceSnapshot:
    """Segments and used blocks of a device when the file was written, and the events that led there."""

    device: int
    segments: list[SnapshotSegment] = field(default_factory=list)
    blocks: list[SnapshotBlock] = field(default_factory=list)
    events: list[HistoryEvent] = field(default_factory=list)
    """In order."""
    stacks: list[int] = field(default_factory=list)
    """Of each event, the index into `Snapshot.stacks`."""
    times_us: list[int] = field(default_factory=list)
    """Of each event, microseconds; 0: not recorded, as before torch 2.2."""


class Snapshot(Record):
    """A snapshot's devices that hold memory or have events, and the options of their allocator."""

    devices: tuple[DeviceSnapshot, ...]
    options: AllocatorOptions
    stacks: tuple[Stack, ...] = ((),)
    """Distinct stacks, the innermost frame first. The first stack is empty: no frames were recorded."""


class _NoClasses(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError("it names a class")


class _Wrong(Exception):
    """What a snapshot has that no snapshot of torch has."""


def snapshot_of(data: bytes, name: str = "The snapshot") -> Snapshot:
    """The snapshot in the bytes of a pickle. Raises UnreadableFile."""
    try:
        _check_opcodes(data)
        return _snapshot(_NoClasses(io.BytesIO(data)).load(), most_entries=len(data) // LEAST_ENTRY_BYTES)
    except _Wrong as error:
        raise UnreadableFile(f"{name} is no memory snapshot of torch: {message_of(error)}.", hint=_HINT) from error
    except DAMAGE as error:
        raise UnreadableFile(f"{name} is damaged: {message_of(error)}.", hint=_HINT) from error


def snapshot_in(loaded: object) -> Snapshot:
    """The snapshot in what `torch.cuda.memory._snapshot` returns. Raises UnreadableFile."""
    try:
        return _snapshot(loaded, most_entries=1 << 40)
    except _Wrong as error:
        raise UnreadableFile(f"This is no memory snapshot of torch: {message_of(error)}.", hint=_HINT) from error


def _check_opcodes(data: bytes) -> None:
    """Raises _Wrong at the first opcode that builds anything but numbers, strings, lists and dicts."""
    if data[:1] != PICKLE_HEAD or not 2 <= int.from_bytes(data[1:2]) <= 5:
        raise _Wrong("it is no pickle of protocol 2 to 5")
    n_containers = data.count(b"}") + data.count(b"]")
    if n_containers > MOST_SMALL_CONTAINERS + len(data) // LEAST_CONTAINER_BYTES:
        raise _Wrong(f"it has {n_containers:,} lists and dicts in {len(data):,} bytes")
    position = 2
    while True:
        match = _PLAIN.match(data, position)
        assert match is not None, "the pattern matches the empty string"
        position = match.end()
        opcode = data[position] if position < len(data) else None
        if opcode == _SHORT_STRING:
            position += 2 + int.from_bytes(data[position + 1 : position + 2])
        elif opcode == _STRING:
            position += 5 + int.from_bytes(data[position + 1 : position + 5], "little")
        elif opcode == _PUT and int.from_bytes(data[position + 1 : position + 5], "little") <= position:
            position += 5  # a larger index would make the unpickler's table as large as it says
        elif opcode == _STOP:
            return
        elif opcode is None:
            raise _Wrong("it ends too early")
        else:
            raise _Wrong(f"the byte {opcode:#04x} at {position} builds neither number, string, list nor dict")


def _snapshot(loaded: object, *, most_entries: int) -> Snapshot:
    whole = _dict(loaded, "it")
    segments, traces = _list(whole.get("segments"), "segments"), _list(whole.get("device_traces", []), "device_traces")
    n_entries = len(segments) + sum(len(_list(trace, "a device's trace")) for trace in traces)
    n_entries += sum(len(_list(_dict(segment, "a segment").get("blocks"), "blocks")) for segment in segments)
    if n_entries > most_entries or len(traces) > 1 << 16:
        raise _Wrong("it has more entries than its bytes can hold")
    devices: dict[int, DeviceSnapshot] = {}
    stacks = Stacks()
    for segment in segments:
        number = _number(segment, "device", default=0)
        device = devices.setdefault(number, DeviceSnapshot(device=number))
        device.segments.append(_segment(segment))
        device.blocks.extend(_used_blocks(segment, device.segments[-1], stacks))
    for number, trace in enumerate(traces):
        if trace:
            _add_events(devices.setdefault(number, DeviceSnapshot(device=number)), trace, stacks)
    ordered = tuple(devices[number] for number in sorted(devices))
    for device in ordered:
        _check_overlap(device)
    options = _options(whole.get("allocator_settings"))
    return Snapshot(devices=ordered, options=options, stacks=tuple(stacks.stacks))


def _segment(entry: dict[object, object]) -> SnapshotSegment:
    kind = entry.get("segment_type")
    if kind not in ("small", "large"):
        raise _Wrong("a segment is neither small nor large")
    return SnapshotSegment(
        address=_number(entry, "address"),
        n_bytes=_number(entry, "total_size"),
        stream=_number(entry, "stream", default=0),
        is_small=kind == "small",
        is_expandable=entry.get("is_expandable") is True,
    )


def _used_blocks(entry: dict[object, Any], segment: SnapshotSegment, stacks: Stacks) -> Iterator[SnapshotBlock]:
    """Blocks fill their segment in order."""
    address = segment.address
    for block in entry["blocks"]:
        n_bytes, state = _number(_dict(block, "a block"), "size"), block.get("state")
        if _number(block, "address") != address:
            raise _Wrong("the blocks of a segment do not follow each other")
        if isinstance(state, str) and state in USED:
            request = _number(block, "requested_size")
            if request > n_bytes:
                raise _Wrong("a block is smaller than its request")
            yield SnapshotBlock(
                address=address,
                n_bytes=n_bytes,
                request_bytes=request,
                stream=segment.stream,
                is_freed=state != USED[0],
                stack=stacks.number(block.get("frames")),
            )
        elif state != "inactive":
            raise _Wrong("a block has a state that torch does not have")
        address += n_bytes
    if address != segment.address + segment.n_bytes:
        raise _Wrong("the blocks of a segment do not fill it")


def _add_events(device: DeviceSnapshot, trace: list[object], stacks: Stacks) -> None:
    for index, entry in enumerate(trace):
        if type(entry) is not dict:
            raise _Wrong(f"event {index} is no dict")
        action = entry.get("action")
        if not isinstance(action, str) or action not in ACTIONS:
            raise _Wrong(f"event {index} is of no kind that torch records")
        if action in NO_MEMORY_MOVED:
            continue
        first = entry.get("device_free" if action == "oom" else "addr")
        n_bytes, stream, time_us = entry.get("size"), entry.get("stream", 0), entry.get("time_us", 0)
        if not type(first) is type(n_bytes) is type(stream) is type(time_us) is int:
            raise _Wrong(f"event {index} lacks a number")
        if not (0 <= first < MOST_BYTES and 0 <= n_bytes < MOST_BYTES and 0 <= stream < MOST_BYTES > time_us >= 0):
            raise _Wrong(f"event {index} has a number out of range")
        if n_bytes:
            device.events.append((action, first, n_bytes, stream))
            device.stacks.append(stacks.number(entry.get("frames")))
            device.times_us.append(time_us)


class Stacks:
    """Distinct stacks, the innermost frame first, by number; the first is empty.

    Entries of a snapshot share their lists of frames, and lists share the frames.
    """

    def __init__(self) -> None:
        self.stacks: list[Stack] = [()]
        self._numbers: dict[Stack, int] = {(): 0}
        self._lists: dict[int, int] = {}
        self._members: dict[tuple[int, ...], int] = {}
        self._frames: dict[int, StackFrame] = {}

    def add(self, stack: Stack) -> int:
        """Number of a stack."""
        number = self._numbers.setdefault(stack, len(self.stacks))
        if number == len(self.stacks):
            self.stacks.append(stack)
        return number

    def number(self, frames: object) -> int:
        """Number of a list of frames as torch writes it. Raises _Wrong."""
        if not frames:
            return 0
        if (number := self._lists.get(id(frames))) is not None:
            return number
        entries = _list(frames, "a list of frames")
        members = tuple(map(id, entries))
        number = self._members.get(members)
        if number is None:
            number = self._members[members] = self.add(tuple(map(self._frame, entries)))
        self._lists[id(frames)] = number
        return number

    def _frame(self, entry: object) -> StackFrame:
        frame = self._frames.get(id(entry))
        if frame is None:
            fields = _dict(entry, "a frame")
            file, line, name = fields.get("filename"), fields.get("line"), fields.get("name")
            if not (isinstance(file, str) and isinstance(name, str) and type(line) is int):
                raise _Wrong("a frame lacks its file, line or name")
            frame = self._frames[id(entry)] = StackFrame(
                file[-LONGEST_NAME:], min(max(line, 0), 1 << 31), name[:LONGEST_NAME]
            )
        return frame


def _check_overlap(device: DeviceSnapshot) -> None:
    end = 0
    for segment in sorted(device.segments, key=lambda segment: segment.address):
        if segment.address < end:
            raise _Wrong("two segments overlap")
        end = segment.address + segment.n_bytes


def _options(settings: object) -> AllocatorOptions:
    """The options as torch lists them; snapshots before torch 2.2 have none, and torch's defaults are taken."""
    if settings is None:
        return AllocatorOptions()
    table = _dict(settings, "allocator_settings")
    largest = table.get("max_split_size", -1)
    by_size = _dict(table.get("roundup_power2_divisions", {}), "roundup_power2_divisions")
    divisions = [_number(by_size, str(1 << power), default=0) for power in range(N_DIVISIONS)]
    if any(n > 64 or n & (n - 1) for n in divisions):
        raise _Wrong("roundup_power2_divisions has no power of two up to 64")
    return AllocatorOptions(
        max_split_bytes=largest if type(largest) is int and 0 < largest < MOST_BYTES else None,
        expandable_segments=table.get("expandable_segments") is True,
        divisions=tuple(max(1, n) for n in divisions) if any(divisions) else (),
    )


def _dict(value: object, what: str) -> dict[object, object]:
    if type(value) is not dict:
        raise _Wrong(f"{what} is no dict")
    return value


def _list(value: object, what: str) -> list[Any]:
    if type(value) is not list:
        raise _Wrong(f"{what} is no list")
    return value


def _number(entry: dict[object, object], name: str, *, default: int | None = None) -> int:
    value = entry.get(name, default)
    if type(value) is not int or not 0 <= value < MOST_BYTES:
        raise _Wrong(f"{name} is no number of bytes")
    return value
