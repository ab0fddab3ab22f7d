"""The store: no finished run is lost, damaged files are told apart, and nothing in a run is ever executed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from explorer.errors import BadInput, NotSaved, UnreadableFile
from explorer.jobs import run_file
from explorer.jobs.store import Store, Turn, default_path
from explorer.record import Comparison, Measurement
from tests.jobs.fake_worker import measured

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "deep" / "runs.sqlite")


def test_a_run_comes_back_as_it_was(store: Store) -> None:
    record = measured("sample_models/gpt.py", "blocks.0")
    run_id = store.save(record)
    assert Store(store.path).load(run_id) == record
    (listed,) = store.list()
    assert listed.run_id == run_id and listed.kind == "measurement" and listed.model == "sample_models/gpt.py"
    assert listed.name == "gpt small cpu, recompute 1" and not listed.pinned
    assert listed.headlines == record.headlines() and listed.headlines["step_peak_bytes"] == 6
    assert abs(listed.created - time.time()) < 60


def test_a_comparison_is_listed_by_its_candidate(store: Store) -> None:
    comparison = Comparison(baseline=measured(), candidate=measured("a.py:make", "x", "y"))
    run_id = store.save(comparison, name="mine")
    assert store.load(run_id) == comparison
    (listed,) = store.list()
    assert (listed.name, listed.kind, listed.model) == ("mine", "comparison", "a.py:make")
    assert listed.headlines["verdict"] == "not comparable"


def test_order_names_and_deletion(store: Store) -> None:
    assert store.list() == () and not store.path.exists()
    first, second, third = (store.save(measured(), name=name) for name in "abc")
    store.rename(second, "renamed <b>")
    assert [(run.run_id, run.name) for run in store.list()] == [(third, "c"), (second, "renamed <b>"), (first, "a")]
    store.delete(third)
    assert [run.run_id for run in store.list()] == [second, first]


def test_an_unknown_run_is_named(store: Store) -> None:
    run_id = store.save(measured())
    for act in (
        store.load,
        store.delete,
        store.export_file,
        lambda run: store.rename(run, "x"),
        lambda run: store.write_note(run, "x"),
    ):
        with pytest.raises(BadInput, match="no run nowhere"):
            act("nowhere")
    with pytest.raises(BadInput, match=f"Did you mean {run_id}"):
        store.load(run_id[:-1])


def test_a_file_travels(store: Store, tmp_path: Path) -> None:
    run_id = store.save(measured(n=1000), name="far")
    there = Store(tmp_path / "there.sqlite")
    data = store.export_file(run_id)
    copy = there.import_file(data)
    assert there.load(copy) == store.load(run_id)
    assert there.list()[0].name == "far" and there.list()[0].created == store.list()[0].created
    assert len(data) < 20_000


def test_nobody_else_reads_a_store_a_new_one_or_one_that_was_open_to_all(store: Store) -> None:
    for _ in range(2):
        store.save(measured())
        reader = sqlite3.connect(store.path)
        reader.execute("select count(*) from runs").fetchall()  # the log stays as long as one reads
        store.save(measured())
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in store.path.parent.iterdir()}
        reader.close()
        assert modes == {f"runs.sqlite{suffix}": 0o600 for suffix in ("", "-wal", "-shm")}
        store.path.chmod(0o644)
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700


def test_foreign_damaged_and_newer_stores_say_so(store: Store) -> None:
    run_id = store.save(measured())
    with sqlite3.connect(store.path) as connection:
        connection.execute("update runs set record = ?", (zlib.compress(b"junk")[:-2],))
    connection.close()
    with pytest.raises(UnreadableFile, match="damaged"):
        store.load(run_id)
    with sqlite3.connect(store.path) as connection:
        connection.execute("update runs set record = ?, version = 7", (b"",))
    connection.close()
    with pytest.raises(UnreadableFile, match="version 7"):
        store.load(run_id)
    connection = sqlite3.connect(store.path)
    connection.execute("pragma user_version = 9")
    connection.close()
    with pytest.raises(UnreadableFile, match="version 9"):
        store.list()
    with pytest.raises(NotSaved, match="version 9"):
        store.save(measured())
    store.path.write_text("a text" * 1000)
    with pytest.raises(UnreadableFile, match="cannot be read as a store"):
        store.list()


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotSaved, match="could not be saved") as caught:
        Store(tmp_path / "file" / "runs.sqlite").save(measured())
    assert "CHECKPOINT_EXPLORER_HOME" in caught.value.hint


def test_a_full_disk_says_so_and_loses_nothing_saved_before(store: Store) -> None:
    run_id = store.save(measured())
    source = (
        "import os, resource, sys; from explorer.errors import NotSaved; from explorer.jobs.store import Store;"
        "from tests.jobs.fake_worker import measured, noisy; store = Store(sys.argv[1]);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try: store.save(noisy())\n"
        "except NotSaved as error: print(error.sentence)\n"
        "print(len(store.list()))"
    )
    process = subprocess.run([sys.executable, "-c", source, str(store.path)], capture_output=True, text=True, cwd=ROOT)
    assert "could not be saved" in process.stdout and process.stdout.endswith("1\n"), process
    assert store.load(run_id) == measured()


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE])
def test_a_full_disk_is_no_damaged_store(store: Store, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Listing writes too: the write-ahead log beside the store, and its index."""
    store.save(measured())
    full = sqlite3.OperationalError("as SQLite says it")
    full.sqlite_errorcode = code
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))

    def connect(*_: object, **__: object) -> None:
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", connect)
        with pytest.raises(NotSaved, match="the disk is full") as caught:
            store.list()
    assert "Free some space" in caught.value.hint and len(store.list()) == 1


def test_a_date_that_an_earlier_release_let_in_is_brought_within_the_limits(store: Store) -> None:
    run_id = store.save(measured())
    for date in (1e300, -1e18, float("inf")):
        with sqlite3.connect(store.path) as connection:
            connection.execute("update runs set created = ?", (date,))
        connection.close()
        assert 0 <= store.list()[0].created <= run_file.LATEST
        assert run_file.read(store.export_file(run_id)).created == store.list()[0].created


def test_a_kill_at_any_moment_loses_no_acknowledged_run(store: Store) -> None:
    source = (
        "import sys; from explorer.jobs.store import Store; from tests.jobs.fake_worker import noisy;"
        "store, record = Store(sys.argv[1]), noisy()\n"
        "while True: print(store.save(record), flush=True)"
    )
    acknowledged: list[str] = []
    for n_runs in (1, 4, 7):
        process = subprocess.Popen(
            [sys.executable, "-c", source, str(store.path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        acknowledged += [process.stdout.readline().strip() for _ in range(n_runs)]
        time.sleep(0.003 * n_runs)
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.read().split()
        process.wait()
        process.stdout.close()
    listed = {run.run_id for run in store.list()}
    assert set(acknowledged) <= listed and len(acknowledged) >= 12
    for run_id in acknowledged:
        assert isinstance(store.load(run_id), Measurement)


def test_the_path_can_be_overridden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHECKPOINT_EXPLORER_HOME", str(tmp_path))
    assert default_path() == tmp_path / "runs.sqlite" == Store().path
    monkeypatch.delenv("CHECKPOINT_EXPLORER_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_path().name == "runs.sqlite" and "checkpoint-explorer" in str(default_path())


def test_a_store_of_an_earlier_release_opens_and_learns_what_its_runs_were(store: Store) -> None:
    run_id = store.save(measured("a.py:make", "x"))
    with sqlite3.connect(store.path) as connection:
        for name in ("note", "spec", "machine"):
            connection.execute(f"alter table runs drop column {name}")
        connection.execute("pragma user_version = 1")
    (listed,) = Store(store.path).list()
    assert listed.spec == measured("a.py:make", "x").spec and listed.machine == "test, Linux" and listed.note == ""
    Store(store.path).write_note(run_id, "kept")
    assert [run.note for run in store.list()] == ["kept"]


def test_a_store_of_version_2_opens(store: Store) -> None:
    store.save(measured())
    with sqlite3.connect(store.path) as connection:
        connection.execute("alter table runs drop column imported")
        connection.execute("pragma user_version = 2")
    assert [run.imported for run in Store(store.path).list()] == [False]
    store.save(measured())


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("first", ["store", "turn"])
def test_a_new_home_is_private_whoever_makes_it_first(umask: int, first: str, tmp_path: Path) -> None:
    path = tmp_path / "above" / "home" / "runs.sqlite"
    before = os.umask(umask)
    try:
        if first == "store":
            Store(path).save(measured())
        else:
            with Turn(path, b"a request"):
                pass
        Store(path).save(measured())
    finally:
        os.umask(before)
    for folder in (path.parent.parent, path.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with Turn(shared / "runs.sqlite", b"a request"):
        pass
    assert shared.stat().st_mode & 0o777 == 0o755 & ~before, "an older folder keeps its mode"


def test_a_run_from_a_file_is_marked(store: Store, tmp_path: Path) -> None:
    own = store.save(measured())
    other = Store(tmp_path / "other.sqlite")
    copied = other.import_file(store.export_file(own))
    assert [run.imported for run in store.list()] == [False] and [run.imported for run in other.list()] == [True]
    assert store.import_file(other.export_file(copied)) == own and not store.list()[0].imported, "it is its own run"
