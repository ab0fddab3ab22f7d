"""Snapshots of strangers: the figures of a history are those of its replay, and a damaged or hostile file is refused
in one sentence before anything of it runs."""

from __future__ import annotations

import gzip
import pickle
import pickletools
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import UnreadableFile
from explorer.plan.card import opened as opened_module
from explorer.plan.card import snapshot as snapshot_module
from explorer.plan.card.allocator_options import MIB, AllocatorOptions
from explorer.plan.card.history import start_of
from explorer.plan.card.opened import is_history, open_history, read_history
from explorer.plan.card.snapshot import snapshot_of
from explorer.record.history import DeviceHistory
from tests.hostile import Touch, Trap
from tests.plan.card.histories import (
    BASE,
    FILES,
    RecordedProgram,
    block,
    event,
    file_named,
    histories_of,
    replays,
    small_document,
    snapshot,
)


def history(document: Any) -> DeviceHistory:
    (device,) = histories_of(snapshot_of(pickle.dumps(document)))
    return device


IMAGINARY = [file for file in FILES if file.name.startswith("imaginary")]


@pytest.mark.parametrize("file", sorted({*FILES[::3], *IMAGINARY}), ids=lambda file: file.name[:40])
def test_figures_are_those_of_the_replay(file: Path) -> None:
    """Two methods: the allocator chooses every block itself, the history reads its places from the record."""
    for device, outcome in replays(file):
        document = snapshot(device, outcome.allocator)
        read = snapshot_of(pickle.dumps(document, protocol=2 if file == FILES[0] else 4))
        start = start_of(read.devices[0], read.options)
        assert {(s.address, s.n_bytes) for s in start.segments.values()} == {
            (address, n_bytes) for address, n_bytes, *_ in device["first_segments"]
        }
        assert set(start.blocks) == {address for address, *_ in device["first_blocks"]}
        (figures,) = histories_of(read)
        (run,) = open_history(pickle.dumps(document), "a.pickle").runs
        assert run.held_peak_bytes == figures.requested_bytes
        assert (figures.allocated_bytes, figures.reserved_bytes) == outcome.peaks[1:]
        assert figures.requested_bytes == requested_peak(document, sum(b.request_bytes for b in start.blocks.values()))
        is_refused = "refused" in file.name
        assert len(figures.refused) == is_refused
        assert is_refused or all(row.n_refused is None for row in figures.simulated)


@given(
    seed=st.integers(0, 2**32),
    options=st.sampled_from(["", "max_split_size_mb:64", "roundup_power2_divisions:4", "expandable_segments:True"]),
    capacity_mib=st.one_of(st.none(), st.integers(40, 400)),
    share=st.floats(0, 1),
)
def test_whatever_a_program_records_is_read_as_its_counters_had_it(
    seed: int, options: str, capacity_mib: int | None, share: float
) -> None:
    """Where the buffer has lost the first events, rests of blocks that are gone may be missing from `allocated`."""
    program = RecordedProgram(seed, options, None if capacity_mib is None else capacity_mib * MIB)
    program.act(60)
    n_events = len(program.events)
    for cut in {0, int(share * n_events)}:
        if cut == n_events and not program.allocator.segments:
            continue
        whole = open_history(pickle.dumps(program.document(cut=cut)), "a.pickle")
        (figures,) = whole.devices
        after = program.counters[cut:]
        requested, allocated, reserved = (max(values) for values in zip(*after))
        assert figures.reserved_bytes == reserved
        assert figures.requested_bytes == requested
        assert len(figures.refused) == sum(entry["action"] == "oom" for entry in program.events[cut:])
        assert figures.allocated_bytes is not None
        if cut == 0:
            assert figures.allocated_bytes == allocated
        elif any(entry["action"] == "free_requested" for entry in program.events[cut:]):  # else it looks like 2023's
            assert figures.allocated_bytes <= allocated


def requested_peak(document: dict[str, Any], requested: int) -> int:
    peak = requested
    for entry in document["device_traces"][0]:
        if entry["action"] in ("alloc", "free_completed"):
            requested += entry["size"] if entry["action"] == "alloc" else -entry["size"]
            peak = max(peak, requested)
    return peak


def test_expandable_segments_reserve_less_where_much_was_stranded() -> None:
    """5.75 of 58.28 GB were stranded in this history."""
    ((device, outcome),) = replays(file_named("ctx128_fullstep"))
    figures = history(snapshot(device, outcome.allocator))
    same, expandable = figures.simulated[:2]
    assert figures.stranded_bytes // MIB == 5752
    assert same.reserved_bytes == figures.reserved_bytes
    assert expandable.stranded_bytes < figures.stranded_bytes // 8


def test_a_small_history_by_hand() -> None:
    figures = history(small_document())
    assert figures.first_reserved_bytes == figures.reserved_bytes == 20 * MIB
    assert figures.requested_bytes == figures.allocated_bytes == 4 * MIB
    (refused,) = figures.refused
    assert (refused.event, refused.n_bytes, refused.driver_free_bytes) == (2, 30 * MIB, MIB)
    assert (refused.allocated_bytes, refused.reserved_bytes) == (4 * MIB, 20 * MIB)
    assert [row.n_refused for row in figures.simulated] == [1, 1, 1, 1]


def test_a_refused_request_fits_where_options_leave_room() -> None:
    """Four segments of 20 MiB with 12 MiB each in use; 16 of the 36 free MiB are asked for, and the driver has 2."""
    document = small_document()
    (segment,), trace = document["segments"], []
    for start in range(BASE, BASE + 256 * MIB, 64 * MIB):
        blocks = [block(start, 9 * MIB), block(start + 9 * MIB, 11 * MIB, state="inactive")]
        document["segments"].append(segment | {"address": start, "blocks": blocks})
        trace += [event("segment_alloc", start, 20 * MIB), event("alloc", start, 9 * MIB)]
    document["segments"].remove(segment)
    document["device_traces"] = [[*trace, event("oom", 0, 16 * MIB) | {"device_free": 2 * MIB}]]
    figures = history(document)
    assert figures.reserved_bytes == 80 * MIB
    by_options = {row.options: row.n_refused for row in figures.simulated}
    assert by_options["expandable_segments:True"] == 0


@pytest.mark.parametrize(("gap", "older_bytes"), [(512, 4 * MIB + 512), (MIB, 5 * MIB), (MIB + 512, 4 * MIB)])
def test_a_gap_that_no_block_fills_belongs_to_the_older_block_before_it(gap: int, older_bytes: int) -> None:
    """A large pool splits a rest off if it has more than 1 MiB. What the older block requested is in no event."""
    document = small_document()
    second = BASE + 4 * MIB + gap
    document["segments"][0]["blocks"] = [block(BASE, 20 * MIB, state="inactive")]
    document["segments"][0] |= {"allocated_size": 0, "active_size": 0}
    document["device_traces"] = [[
        event("alloc", second, 4 * MIB),
        *(event(action, at, 4 * MIB) for at in (BASE, second) for action in ("free_requested", "free_completed")),
    ]]  # fmt: skip
    figures = history(document)
    assert (figures.requested_bytes, figures.allocated_bytes) == (8 * MIB, older_bytes + 4 * MIB)


def test_expandable_segments_of_the_record() -> None:
    """Pages that are mapped and unmapped count as reserved; their borders are no segments'."""
    document = small_document()
    document["segments"][0]["is_expandable"] = True
    document["allocator_settings"]["expandable_segments"] = True
    document["device_traces"][0][:0] = [
        event("segment_map", BASE, 20 * MIB), event("segment_map", BASE + 20 * MIB, 20 * MIB),
        event("segment_unmap", BASE + 20 * MIB, 20 * MIB),
    ]  # fmt: skip
    figures = history(document)
    assert (figures.first_reserved_bytes, figures.reserved_bytes) == (0, 40 * MIB)


def test_a_snapshot_needs_neither_settings_nor_events() -> None:
    document = small_document()
    del document["allocator_settings"], document["segments"][0]["segment_pool_id"]
    assert history(document).requested_bytes == 4 * MIB
    (figures,) = histories_of(snapshot_of(pickle.dumps({"segments": document["segments"]})))
    assert figures.n_events == 0 and figures.allocated_bytes == 4 * MIB
    assert histories_of(snapshot_of(pickle.dumps({"segments": [], "device_traces": [[]]}))) == ()


def test_options_are_read_as_torch_lists_them() -> None:
    document = small_document()
    document["allocator_settings"] |= {
        "max_split_size": 64 * MIB,
        "roundup_power2_divisions": {str(1 << i): 4 if i < 3 else 0 for i in range(16)},
    }
    options = snapshot_of(pickle.dumps(document)).options
    assert options == AllocatorOptions(max_split_bytes=64 * MIB, divisions=(4,) * 3 + (1,) * 13)


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = small_document()
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return document


SEGMENT, EVENT = ("segments", 0), ("device_traces", 0, 2)


@pytest.mark.parametrize(("document", "words"), [
    (3, "it is no dict"),
    ({}, "segments is no list"),
    (changed(("segments",), {}), "segments is no list"),
    (changed(SEGMENT, []), "a segment is no dict"),
    (changed((*SEGMENT, "address"), -1), "address is no number"),
    (changed((*SEGMENT, "address"), True), "address is no number"),
    (changed((*SEGMENT, "total_size"), 1 << 70), "total_size is no number"),
    (changed((*SEGMENT, "total_size"), 40 * MIB), "do not fill it"),
    (changed((*SEGMENT, "segment_type"), []), "neither small nor large"),
    (changed((*SEGMENT, "device"), "cuda"), "device is no number"),
    (changed((*SEGMENT, "blocks", 0, "state"), []), "a state that torch does not have"),
    (changed((*SEGMENT, "blocks", 0, "requested_size"), 5 * MIB), "smaller than its request"),
    (changed((*SEGMENT, "blocks", 1, "address"), BASE), "do not follow each other"),
    (changed(("segments",), small_document()["segments"] * 2), "two segments overlap"),
    (changed(("device_traces",), [3]), "a device's trace is no list"),
    (changed(EVENT, None), "event 2 is no dict"),
    (changed((*EVENT, "action"), "explode"), "of no kind that torch records"),
    (changed((*EVENT, "action"), {}), "of no kind that torch records"),
    (changed((*EVENT, "addr"), 1.5), "event 2 lacks a number"),
    (changed((*EVENT, "size"), -1), "out of range"),
    (changed((*EVENT, "addr"), BASE + 512), "contradict each other"),
    (changed((*EVENT, "action"), "free_completed"), "contradict each other"),
    (changed((*EVENT, "action"), "segment_alloc"), "contradict each other"),
    (changed(("allocator_settings",), []), "allocator_settings is no dict"),
    (changed(("allocator_settings", "roundup_power2_divisions"), {"1": 3}), "no power of two"),
])  # fmt: skip
def test_wrong_fields_are_one_sentence(document: Any, words: str) -> None:
    with pytest.raises(UnreadableFile, match=words):
        histories_of(snapshot_of(pickle.dumps(document)))


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    """Cut anywhere, and with any byte turned: refused, or read as another snapshot; never another error."""
    data = pickle.dumps(small_document())
    for length in range(len(data)):
        with pytest.raises(UnreadableFile):
            snapshot_of(data[:length])
    for i in range(2, len(data)):
        for bit in (1, 32, 128):
            turned = bytearray(data)
            turned[i] ^= bit
            try:
                histories_of(snapshot_of(bytes(turned)))
            except UnreadableFile as error:
                assert len(error.sentence) < 400
    with pytest.raises(UnreadableFile, match="cannot be read"):
        read_history(tmp_path / "none.pickle")
    (tmp_path / "a.pickle").write_bytes(data)
    assert is_history(data[:64])
    assert read_history(tmp_path / "a.pickle") == open_history(data, "a.pickle")


@pytest.mark.parametrize("pool", [(0, 0), (0, 300), (70_000, 1), (1 << 33, 1 << 40)])
@pytest.mark.parametrize("protocol", [4, 5])
def test_a_frame_may_begin_between_any_two_opcodes(pool: tuple[int, int], protocol: int) -> None:
    """A pickler begins a frame after each 64 KiB. Torch 2.13 writes a pair `pool_id` in every event."""
    document, between = small_document(), 0
    whole = snapshot_of(pickle.dumps(document))
    document["more"] = [{"pool_id": (first, pool[1])} for first in [pool[0]] * 6000]
    for n_shifted in range(24):
        document["allocator_settings"]["shift"] = "x" * n_shifted
        data = pickle.dumps(document, protocol=protocol)
        opcodes = [opcode.name for opcode, _, _ in pickletools.genops(data)]
        frames = [at for at, name in enumerate(opcodes) if name == "FRAME"][1:]
        between += any("TUPLE2" in opcodes[at + 1 : at + 3] and opcodes[at - 1] in NUMBERS for at in frames)
        assert snapshot_of(data) == whole, n_shifted
    assert between > 0, "no frame began inside a pair"


NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1")
TORCHS = sorted((Path(__file__).parents[2] / "golden" / "imaginary").glob("snapshot-*.pickle.gz"))


@pytest.mark.parametrize("file", TORCHS, ids=lambda file: file.name)
def test_files_that_torch_wrote_are_read(file: Path) -> None:
    """A second count of the events, and of the bytes in use at the end, by Python's own unpickler."""
    data = gzip.decompress(file.read_bytes())
    document = pickle.loads(data)
    (device,) = (read for read in snapshot_of(data).devices if read.events)
    (trace,) = (entries for entries in document["device_traces"] if entries)
    assert len(device.events) == sum(entry["action"] != "snapshot" and entry["size"] > 0 for entry in trace)
    in_use = sum(segment["allocated_size"] for segment in document["segments"])
    assert sum(block.n_bytes for block in device.blocks if not block.is_freed) == in_use
    assert open_history(data, file.name).devices[0].allocated_bytes >= in_use


def hostile_pickles(mark: Path) -> dict[str, bytes]:
    cyclic = deepcopy(small_document())
    cyclic["segments"].append(cyclic["segments"])
    again = small_document()
    again["segments"] *= 100_000
    traces: list[Any] = small_document()["device_traces"] * 100_000
    nested = b"\x80\x04]" + b"(]" * 1_000_000 + b"e" * 1_000_000 + b"."
    return {
        "class": pickle.dumps({"segments": [Touch(mark)]}),
        "protocol 2": pickle.dumps(Touch(mark), protocol=2),
        "protocol 0": pickle.dumps(Touch(mark), protocol=0),
        "system": b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.",
        "system behind a header": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        "instance": b"\x80\x02(ios\nsystem\n.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02Px\n.",
        "large table": b"\x80\x02}r" + struct.pack("<I", 1 << 31) + b".",
        "large string": b"\x80\x04X" + struct.pack("<I", (1 << 32) - 1) + b"a.",
        "large byte array": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"a.",
        "nested tuples as a key": b"\x80\x04})" + b"\x85" * 1_000_000 + b"K\x00s.",
        "nested lists": nested,
        "cyclic": pickle.dumps(cyclic),
        "one segment many times": pickle.dumps(again),
        "one trace many times": pickle.dumps(small_document() | {"device_traces": traces}),
        "a list as a key": b"\x80\x04}]K\x00s.",
        "nothing on the stack": b"\x80\x04s.",
        "empty": b"",
    }


def test_hostile_pickles_run_nothing(tmp_path: Path) -> None:
    trap = Trap(tmp_path)
    for name, data in hostile_pickles(trap.mark).items():
        with pytest.raises(UnreadableFile):
            print(name, snapshot_of(data))
    assert not trap.mark.exists()
    pickle.loads(hostile_pickles(trap.mark)["class"])
    assert trap.mark.exists(), "the trap works"


def test_no_class_is_admitted_even_without_the_first_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_check_opcodes", lambda data: None)
    with pytest.raises(UnreadableFile, match="names a class"):
        snapshot_of(pickle.dumps(Touch(tmp_path / "mark")))
    assert not (tmp_path / "mark").exists()


def test_small_containers_have_a_largest_number() -> None:
    """An empty list takes two bytes of a file and 56 of memory. A file may have 100,000, and one for 10 bytes of it."""

    def with_lists(n: int) -> bytes:
        return b"\x80\x04" + b"]" * n + b"."

    for n, is_refused in ((111_111, False), (111_112, True)):
        assert (n > 100_000 + len(with_lists(n)) // 10) == is_refused
        with pytest.raises(UnreadableFile) as error:  # a list is no snapshot
            snapshot_of(with_lists(n))
        assert (f"it has {n:,} lists and dicts" in error.value.sentence) == is_refused


def test_a_file_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_module, "LARGEST_BYTES", MIB)
    with pytest.raises(UnreadableFile, match="more than 1 MiB"):
        open_history(b"\x80" * (MIB + 1), "a.pickle")
