"""Every finished run, in one SQLite file: written before the run is reported as finished.

A run in the store, a run in a file and a run on the pipe are the same msgpack document. Opening one never executes
anything: a model reference inside it is a string.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import platformdirs
from msgspec.structs import replace

from explorer.errors import BadInput, NotSaved, UnreadableFile, message_of, nearest
from explorer.jobs import run_file
from explorer.jobs.run_file import KINDS, StoredRecord, model_of
from explorer.record.base import Record, from_json, from_msgpack, to_json
from explorer.record.run import RunSpec

VERSION = 1
"""The form that records are stored in."""
LEVEL = 6
"""Compression level, fixed so that equal records are equal bytes in the file."""
_TABLE_VERSION = 3
_BUSY_S = 20.0
_LEAST_FREE_BYTES = 1 << 16
"""The index of a write-ahead log takes 32 KiB."""
_TABLE = """
create table if not exists runs (
    id text primary key, kind text not null, name text not null, model text not null, created real not null,
    pinned integer not null default 0, version integer not null, headlines text not null, record blob not null
)"""
_ADDED = ("note", "spec", "machine", "imported")
"""Columns of text that tables of earlier versions do not have: `imported` came with version 3, the others with 2."""
_LISTED = ("id", "name", "kind", "model", "created", "pinned", "headlines", *_ADDED)


class StoredRun(Record):
    """A line of the list of runs; `Store.load` returns the record."""

    run_id: str
    name: str
    kind: str
    """A key of KINDS: `measurement`, `comparison`, ..."""
    model: str
    """Target of the model reference."""
    created: float
    """Seconds since 1970, UTC."""
    pinned: bool
    """Whether an earlier release pinned the run as a baseline."""
    headlines: dict[str, Any]
    """Headline figures that the record derived when saved: step_peak_bytes, verdict, ..."""
    note: str = ""
    """A person's note on the run; the run file does not contain the note."""
    spec: RunSpec | None = None
    """Specification of the run, or of the candidate in a comparison; None if the kind of run has none."""
    machine: str = ""
    """Device and platform that ran it."""
    imported: bool = False
    """Whether it came from a file: what it says of its machine and date was not seen here."""


def default_path() -> Path:
    """`runs.sqlite` in CHECKPOINT_EXPLORER_HOME, else in the user's data directory."""
    home = os.environ.get("CHECKPOINT_EXPLORER_HOME")
    return (Path(home) if home else platformdirs.user_data_path("checkpoint-explorer", appauthor=False)) / "runs.sqlite"


class Store:
    """The runs of one file. Several threads and processes may use it at once: each call opens its own connection."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()

    def save(self, record: Record, name: str = "", *, encoded: bytes | None = None) -> str:
        """Returns the new run's id once the run is on disk. Raises NotSaved (disk full, read-only, locked).

        `encoded` is the record's msgpack, for a caller that sends the same bytes elsewhere too.
        """
        return self._insert(run_file.stored_record(record, name, encoded), record)

    def state(self) -> tuple[tuple[int, int], ...]:
        """Sizes and dates of the store's files: another value after any process has saved a run."""
        stats = []
        for file in (self.path, Path(f"{self.path}-wal")):
            with suppress(OSError):
                stats.append((file.stat().st_size, file.stat().st_mtime_ns))
        return tuple(stats)

    def verdict_on(self, spec: RunSpec) -> str:
        """The verdict of the newest comparison of this machine with `spec`, however often it was timed and probed.

        Empty if there is none, or none with the file of the model as it is now.
        """

        def untimed(each: RunSpec | None) -> RunSpec | None:
            return None if each is None else replace(each, n_repeats=0, n_probes=0)

        file = Path(spec.model.target.partition(":")[0])
        changed = file.stat().st_mtime if file.is_file() else 0.0
        rows = [row for row in self.list() if row.headlines.get("verdict") and not row.imported]
        same = [row for row in rows if row.created >= changed and untimed(row.spec) == untimed(spec)]
        newest = max(same, key=lambda row: row.created, default=None)
        return "" if newest is None else str(newest.headlines["verdict"])

    def list(self) -> tuple[StoredRun, ...]:
        """All runs, the newest first. Raises UnreadableFile."""
        if not self.path.exists():
            return ()
        with self._reading() as connection:
            rows = connection.execute(f"select {', '.join(_LISTED)} from runs order by created desc").fetchall()
        # Kinds that an earlier release kept (arenas, derivative matrices) stay in the file and are not listed.
        return tuple(listed for listed in map(_listed, rows) if listed.kind in KINDS)

    def load(self, run_id: str) -> Record:
        """The record of a run. Raises BadInput for an unknown id, UnreadableFile for a damaged record."""
        stored = self._stored(run_id)
        return from_msgpack(stored.record, KINDS[stored.kind])

    def rename(self, run_id: str, name: str) -> None:
        """Raises BadInput for an unknown id, NotSaved when the file cannot be written."""
        self._update(run_id, "update runs set name = ? where id = ?", name)

    def write_note(self, run_id: str, note: str) -> None:
        """Words beside the run. Raises BadInput for an unknown id, NotSaved when the file cannot be written."""
        self._update(run_id, "update runs set note = ? where id = ?", note)

    def delete(self, run_id: str) -> None:
        """Forgets a run for good."""
        self._update(run_id, "delete from runs where id = ?")

    def export_file(self, run_id: str) -> bytes:
        """The bytes of a run file, for another machine."""
        return run_file.write(self._stored(run_id))

    def import_file(self, data: bytes) -> str:
        """Id of the run from `export_file`: of the stored run of equal content, else of a new one.

        Raises UnreadableFile, NotSaved.
        """
        stored = run_file.read(data)
        record = from_msgpack(stored.record, KINDS[stored.kind])
        return self._equal_to(stored) or self._insert(stored, record, imported="yes")

    def _equal_to(self, stored: StoredRecord) -> str | None:
        """Id of the run whose record has the same bytes, else None."""
        if not self.path.exists():
            return None
        packed = zlib.compress(stored.record, LEVEL)
        with self._reading() as connection:
            row = connection.execute("select id from runs where kind = ? and record = ?", (stored.kind, packed))
            return next((str(run_id) for (run_id,) in row), None)

    def _insert(self, stored: StoredRecord, record: Record, *, imported: str = "") -> str:
        headlines = json.dumps(record.headlines()) if hasattr(record, "headlines") else "{}"
        run_id = secrets.token_hex(6)
        named = run_id, stored.kind, stored.name, model_of(record), stored.created, VERSION
        row = *named, headlines, zlib.compress(stored.record, LEVEL), *_ran(record), imported
        with self._writing() as connection:
            connection.execute("insert into runs values (?, ?, ?, ?, ?, 0, ?, ?, ?, '', ?, ?, ?)", row)
        return run_id

    def _stored(self, run_id: str) -> StoredRecord:
        row = None
        if self.path.exists():
            with self._reading() as connection:
                row = connection.execute(
                    "select kind, name, created, version, record from runs where id = ?", (run_id,)
                ).fetchone()
        if row is None:
            raise self._unknown(run_id)
        kind, name, created, version, data = row
        if version > VERSION or kind not in KINDS:
            raise UnreadableFile(
                f"The run {run_id} is a {kind} of version {version}; this release reads version {VERSION}.",
                hint="Update Checkpoint Explorer.",
            )
        try:
            return StoredRecord(kind=kind, name=name, created=_date(created), record=zlib.decompress(data))
        except zlib.error as error:
            raise UnreadableFile(
                f"The run {run_id} is damaged: {message_of(error)}.", hint="Delete it and run again."
            ) from error

    def _update(self, run_id: str, statement: str, *values: object) -> None:
        with self._writing() as connection:
            n_changed = connection.execute(statement, (*values, run_id)).rowcount
        if not n_changed:
            raise self._unknown(run_id)

    def _unknown(self, run_id: str) -> BadInput:
        run_ids = [run.run_id for run in self.list()]
        return BadInput(
            f"There is no run {run_id} in {self.path}, which holds {len(run_ids)}.",
            hint=nearest(run_id, run_ids) or "`python -m explorer report` lists them.",
        )

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._connection() as connection:
                yield connection
        except sqlite3.Error as error:
            if self._disk_is_full(error):
                raise NotSaved(
                    f"{self.path} cannot be opened: the disk is full ({message_of(error)}).",
                    hint="Free some space, or set CHECKPOINT_EXPLORER_HOME to another folder. No run is lost.",
                ) from error
            raise UnreadableFile(
                f"{self.path} cannot be read as a store of runs: {message_of(error)}.",
                hint="Move the file away to start an empty store, or set CHECKPOINT_EXPLORER_HOME to another folder.",
            ) from error

    def _disk_is_full(self, error: sqlite3.Error) -> bool:
        """SQLite says so for its own file. For the index of its write-ahead log it says `disk I/O error`."""
        code = getattr(error, "sqlite_errorcode", None) or 0
        if code & 0xFF == sqlite3.SQLITE_IOERR and shutil.disk_usage(self.path.parent).free < _LEAST_FREE_BYTES:
            return True
        return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            make_private_folder(self.path.parent)
            with self._connection() as connection, connection:
                connection.execute("begin immediate")
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise NotSaved(
                f"The run could not be saved in {self.path}: {message_of(error)}.",
                hint="Free some space, move a damaged file away, or set CHECKPOINT_EXPLORER_HOME to another folder.",
            ) from error

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        _make_private(self.path)
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        try:
            # With a write-ahead log readers and writers do not wait for each other; full: on disk before it counts.
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
            (version,) = connection.execute("pragma user_version").fetchone()
            if version > _TABLE_VERSION:
                raise sqlite3.NotSupportedError(
                    f"it has version {version} and this release reads version {_TABLE_VERSION}"
                )
            if version < _TABLE_VERSION:
                _bring_up_to_date(connection)
            yield connection
        finally:
            connection.close()


class Turn:
    """The turn of a request among equal requests of all processes with the same store, from `comes` to the exit.

    The file of the turn is locked, and names the run of the last one whose turn it was. The system unlocks the file of
    a process that is killed.
    """

    def __init__(self, store: Path, request: bytes) -> None:
        """`request` is all that makes two requests equal. Raises OSError if the store's folder cannot be written."""
        self._key = hashlib.sha256(request).hexdigest()
        folder = store.parent / "turns"  # of few files: requests with one file wait for each other
        make_private_folder(folder)
        self._file = os.open(folder / self._key[:2], os.O_RDWR | os.O_CREAT, 0o600)
        self._has_waited = False
        self.run_id: str | None = None
        """The run of an equal request that ended while this one waited."""

    def comes(self) -> bool:
        """Whether no other process has the turn. Then it is this one's."""
        with suppress(OSError, ImportError):  # a file system, or a system, without locks
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._has_waited = True
                return False
        key, _, run_id = os.pread(self._file, 200, 0).decode().partition(" ")
        self.run_id = run_id if self._has_waited and key == self._key else None
        os.ftruncate(self._file, 0)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.run_id:
            os.pwrite(self._file, f"{self._key} {self.run_id}".encode(), 0)
        os.close(self._file)


def make_private_folder(folder: Path) -> None:
    """Makes a folder, and all missing ones above it, that only the user can open, whatever the umask.

    An older folder keeps its mode.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with suppress(FileExistsError):  # another process was quicker
            path.mkdir(mode=0o700)
            path.chmod(0o700)


def _make_private(path: Path) -> None:
    """Makes the store readable by its user alone. SQLite gives the files beside the store the mode of the store.

    A folder that this program made is private; an older folder keeps its mode.
    """
    with suppress(OSError):  # SQLite reports the error
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT, 0o600))
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(OSError):  # not there, or another user's
            file.chmod(file.stat().st_mode & 0o700)


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Creates the table, or updates the table of an earlier release: new columns are read from the records once."""
    with connection:
        connection.execute("begin immediate")
        (version,) = connection.execute("pragma user_version").fetchone()
        if version == _TABLE_VERSION:  # another process was quicker
            return
        connection.execute(_TABLE)
        columns = {name for _, name, *_ in connection.execute("pragma table_info(runs)")}
        for name in _ADDED:
            if name not in columns:
                connection.execute(f"alter table runs add column {name} text not null default ''")
        connection.execute(f"pragma user_version = {_TABLE_VERSION}")
        if "spec" in columns:
            return
        for run_id, kind, data in connection.execute("select id, kind, record from runs").fetchall():
            try:
                ran = _ran(from_msgpack(zlib.decompress(data), KINDS[kind]))
            except (zlib.error, KeyError, UnreadableFile):  # said when it is opened
                continue
            connection.execute("update runs set spec = ?, machine = ? where id = ?", (*ran, run_id))


def _ran(record: Record) -> tuple[str, str]:
    """Columns of the table: the run's specification as JSON, and its device and platform."""
    spec = run_file.spec_of(record)
    environment = getattr(getattr(record, "candidate", record), "environment", None)
    where = f"{environment.device_name}, {environment.platform}" if environment is not None else ""
    return "" if spec is None else to_json(spec).decode(), where


def _listed(row: tuple[Any, ...]) -> StoredRun:
    run_id, *columns = row
    values = dict(zip(_LISTED[1:], columns))
    values |= {
        "created": _date(values["created"]),
        "pinned": bool(values["pinned"]),
        "imported": bool(values["imported"]),
        "spec": _spec(values["spec"]),
    }
    return StoredRun(run_id=run_id, **{**values, "headlines": json.loads(values["headlines"])})


def _date(created: float) -> float:
    """A date within the limits of a run file, as a store of an earlier release may hold other dates."""
    return min(max(created, 0.0), run_file.LATEST)


def _spec(text: str) -> RunSpec | None:
    """The spec of a row; None also for a spec of a later release, which raises when the run is opened."""
    try:
        return from_json(text, RunSpec) if text else None
    except UnreadableFile:
        return None
