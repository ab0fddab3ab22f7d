"""A run as a single file: damage, foreign files and newer versions are told apart, and nothing in it is executed."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.errors import BadInput, UnreadableFile
from explorer.jobs import run_file
from explorer.jobs.run_file import StoredRecord, files_of_ranks, grouped, open_files
from explorer.record import Policy, Unit
from explorer.record.base import from_msgpack, to_msgpack
from explorer.record.measurement import RecordedRanks
from tests.jobs.fake_worker import measured

FILE = run_file.write(StoredRecord(kind="measurement", name="n", created=1.0, record=to_msgpack(measured())))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(FILE) * 8 - 1))
def test_every_flipped_bit_is_noticed(bit: int) -> None:
    data = bytearray(FILE)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(UnreadableFile):
        run_file.read(bytes(data))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(FILE) - 1))
def test_every_cut_is_noticed(n_bytes: int) -> None:
    with pytest.raises(UnreadableFile, match="cut short|not a run file"):
        run_file.read(FILE[:n_bytes])


@settings(max_examples=50, deadline=None)
@given(st.binary().filter(lambda data: not data.startswith(run_file.MAGIC)))
def test_foreign_files_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadableFile, match="not a run file"):
        run_file.read(data)


def test_newer_files_and_unknown_kinds_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(run_file, "VERSION", 9)
        newest = run_file.write(StoredRecord(kind="measurement", name="n", created=1.0, record=b""))
    with pytest.raises(UnreadableFile, match="version 9; this release reads version 1"):
        run_file.read(newest)
    odd = run_file.write(StoredRecord(kind="dream", name="n", created=1.0, record=b""))
    with pytest.raises(UnreadableFile, match="holds a dream"):
        run_file.read(odd)
    wrong = run_file.write(StoredRecord(kind="measurement", name="n", created=1.0, record=b"\x80"))
    with pytest.raises(UnreadableFile, match="not a Measurement.*spec"):
        run_file.read(wrong)


def packed(*pieces: bytes) -> bytes:
    """A run file with a right checksum around `pieces`, one after the other."""
    packer = zlib.compressobj(1)
    body = b"".join([*map(packer.compress, pieces), packer.flush()])
    version, length = run_file._VERSION.pack(run_file.VERSION), run_file._LENGTH.pack(len(body))
    return run_file.MAGIC + version + run_file._digest(version, length, body) + length + body


def small_numbers(n: int, padding: int) -> bytes:
    """A file whose list of times takes 32 bytes of memory for each of its bytes."""
    plain = msgspec.msgpack.decode(to_msgpack(measured()))
    plain |= {"times": {"clock": "CUDA events", "step": {"ms": [0] * n}}, "recorded_in": os.urandom(padding).hex()}
    record = msgspec.msgpack.encode(plain)
    return packed(to_msgpack(StoredRecord(kind="measurement", name="n", created=1.0, record=record)))


@pytest.mark.slow
def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Zeros without end, just below the ratio, and numbers that grow when they are read: refused in a small process."""
    million = bytes(10**6)
    noise = os.urandom(10**6)
    bombs = {
        "zeros": packed(*[million] * 30),
        "noise and zeros": packed(noise, *[million] * 150, noise[::-1], *[million] * 120),
        "numbers": small_numbers(3 * 10**6, 0),
        "numbers and noise": small_numbers(20 * 10**6, 10**5),
    }
    for name, data in bombs.items():
        (tmp_path / name).write_bytes(data)
        assert len(data) < 4 * 10**6
    source = (
        "import resource, sys; from pathlib import Path; from explorer.errors import BadInput, UnreadableFile\n"
        "from explorer.jobs import run_file\n"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = most()\n"
        "for file in Path(sys.argv[1]).iterdir():\n"
        "    try: run_file.read(file.read_bytes())\n"
        "    except UnreadableFile as error: print(error.sentence)\n"
        "print(most() - before)"
    )
    process = subprocess.run([sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True, check=True)
    *sentences, grown_mib = process.stdout.splitlines()
    assert len(sentences) == len(bombs) and all("at most" in said or "more than" in said for said in sentences)
    assert int(grown_mib) < 150, sentences


def test_columns_are_bounded_by_the_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = StoredRecord(kind="measurement", name="n", created=1.0, record=to_msgpack(measured(n=20_000)))
    monkeypatch.setattr(run_file, "_LARGEST_OUTSIDE_COLUMNS", len(stored.record) // 50)
    assert run_file.read(run_file.write(stored)) == stored


def test_a_forged_checksum_does_not_make_a_run() -> None:
    run = measured()
    assert run.allocations is not None
    log = msgspec.structs.replace(run.allocations, n_ticks=10**9)
    forged = to_msgpack(msgspec.structs.replace(run, allocations=log))
    stored = StoredRecord(kind="measurement", name="n", created=1.0, record=forged)
    with pytest.raises(UnreadableFile, match="not hold a run that can have happened: 1000000000 ticks for"):
        run_file.read(run_file.write(stored))


def test_a_run_that_nobody_named_says_what_its_units_do() -> None:
    run = measured()
    units = [Unit(blocks=(name,), action=action) for name, action in zip("abc", ("recompute", "save_ops", "offload"))]

    def told(*some: Unit) -> str:
        spec = msgspec.structs.replace(run.spec, policy=Policy(units=some))
        return run_file.name_of(msgspec.structs.replace(run, spec=spec)).partition(", ")[2]

    assert [told(), told(*units[:2]), told(units[2])] == ["keep all", "recompute 2", "offload 1"]
    assert told(*units) == "recompute 2, offload 1"
    assert told(Unit(blocks=("a", "b")), units[2]) == "recompute 2, offload 1", "blocks, not units"


def file_of(rank: int | None, n_ranks: int = 3, where: str = "train.py:42, step 2") -> bytes:
    recorded = f"{where}, rank {rank}" if rank is not None else where
    run = msgspec.structs.replace(
        measured(), rank=rank, n_ranks=None if rank is None else n_ranks, recorded_in=recorded
    )
    return run_file.write(run_file.stored_record(run, f"rank {rank}"))


def test_files_beside_each_other_come_by_rank(tmp_path: Path) -> None:
    for name in ("step.rank10.explorer", "step.rank2.explorer", "step.explorer", "other.rank0.explorer"):
        (tmp_path / name).write_bytes(b"")
    names = [path.name for path in files_of_ranks(tmp_path / "step.explorer")]
    assert names == ["step.rank2.explorer", "step.rank10.explorer"]
    assert files_of_ranks(tmp_path / "nowhere" / "step.explorer") == []


def test_ranks_of_one_step_are_one_run_in_order() -> None:
    stored = open_files([file_of(2), file_of(0)])
    run = from_msgpack(stored.record, RecordedRanks)
    assert [one.rank for one in run.ranks] == [0, 2] and run.missing == (1,)
    assert stored.name == "train.py:42, step 2, 2 of 3 ranks"
    assert open_files([file_of(None)]).kind == "measurement"


def test_what_was_chosen_together_is_grouped_by_step() -> None:
    stored = grouped([file_of(0), file_of(None), file_of(1), file_of(0, where="train.py:42, step 9")])
    assert [one.kind for one in stored] == ["recorded ranks", "measurement", "measurement"]


def test_every_fault_is_told() -> None:
    with pytest.raises(BadInput, match=r"rank 0 is there twice; they are of trainings with 2 and 3 ranks; they were"):
        open_files([file_of(0), file_of(0), file_of(1, n_ranks=2, where="a.py:1, step 1")])
    with pytest.raises(BadInput, match="rank None was recorded by none"):
        open_files([file_of(0), file_of(None)])
