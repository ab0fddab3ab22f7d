"""Ranks as processes of this machine: started from a warm fork server, watched, and never left behind.

    worker ── forkserver (torch imported once) ──▶ rank 0 ┐
                                               ──▶ rank 1 ┤ gloo or NCCL
      ▲ sentinels, pulses                      ──▶ rank 2 ┘
      └── the first rank that dies, or the time limit, ends all of them; the guilty one is named

A rank also ends itself when the worker is gone: it listens to a pipe whose other end only the worker holds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec

from explorer.errors import ExplorerError
from explorer.record.base import from_json, from_msgpack, to_json
from explorer.record.measurement import Failure
from explorer.record.pipeline import RankReport
from explorer.record.progress import Progress, Report, silent
from explorer.record.run import RunSpec

GRACE_S = 1.0
"""How long the other ranks may take to say what they saw, once one has failed."""
POLL_S = 0.2
WAITING = -1
BETWEEN_RANKS = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "TCPStore", "Broken pipe")
"""Words of an error that another rank's end caused."""


@dataclass(frozen=True)
class RanksEnded:
    """What the processes left: a report of every rank that spoke, or the first failure and whose it is."""

    reports: dict[int, RankReport]
    failure: Failure | None = None
    failed_rank: int | None = None
    started_s: float = 0.0
    """From the first process's start to the moment when all had joined."""


def warm_context() -> ForkServerContext:
    """The fork server, with torch imported once it runs. Never initialises CUDA, so ranks may."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["explorer.engine.pipeline.rank_main"])
    return context


def run_ranks(
    spec: RunSpec, n_ranks: int, out: Path, report: Report = silent, *, joined_only: bool = False
) -> RanksEnded:
    """Runs every rank of `spec` to its end, or to the first failure. Raises Cancelled, after all have stopped.

    `joined_only` stops where the process group stands: what starting costs. Results are files in `out`.
    """
    context = warm_context()
    rendezvous = Path(tempfile.mkdtemp(prefix="ranks-")) / "store"
    pulses = context.Array("l", [WAITING] * (2 * n_ranks), lock=False)
    ear, voice = context.Pipe(duplex=False)
    begun = time.monotonic()
    ranks: list[ForkServerProcess] = []
    try:
        for rank in range(n_ranks):
            job = RankJob(to_json(spec), rank, n_ranks, str(rendezvous), str(out), joined_only)
            process = context.Process(target=rank_process, args=(job, pulses, ear), name=f"rank {rank}", daemon=True)
            process.start()
            ranks.append(process)
        ear.close()
        return _watch(_Watched(spec, ranks, pulses, out, begun), report)
    finally:
        _stop(ranks)
        voice.close()
        _remove(rendezvous.parent)


@dataclass(frozen=True)
class RankJob:
    """What one process is told."""

    spec_json: bytes
    rank: int
    n_ranks: int
    rendezvous: str
    out: str
    joined_only: bool


def rank_process(job: RankJob, pulses: Any, ear: connection.Connection) -> None:
    """Body of one rank's process."""
    threading.Thread(target=_end_with_worker, args=(ear,), daemon=True).start()
    import torch.distributed as dist

    from explorer.engine.pipeline.rank_main import failed, join, run_rank, write_report

    spec = from_json(job.spec_json, RunSpec)

    def announce(name: str) -> None:
        """A pulse for the watcher: when the action began, in seconds; WAITING between actions."""
        pulses[job.rank] = int(time.monotonic()) if name else WAITING

    try:
        join(spec, job.rank, init_method=f"file://{job.rendezvous}", rank=job.rank, world_size=job.n_ranks)
        pulses[job.n_ranks + job.rank] = 1
        if not job.joined_only:
            run_rank(spec, Path(job.out), announce)
    except BaseException as error:
        write_report(failed(spec, job.rank, error), Path(job.out))
        # Not sys.exit: a peer's death leaves threads of the transport that would wait for ever.
        os._exit(1)
    dist.destroy_process_group()


@dataclass
class _Watched:
    spec: RunSpec
    ranks: list[ForkServerProcess]
    pulses: Any
    out: Path
    begun: float
    started_s: float = 0.0

    @property
    def n_joined(self) -> int:
        return sum(self.pulses[len(self.ranks) + rank] == 1 for rank in range(len(self.ranks)))


def _watch(watched: _Watched, report: Report) -> RanksEnded:
    ranks = watched.ranks
    while True:
        alive = [process for process in ranks if process.exitcode is None]
        if not watched.started_s and watched.n_joined == len(ranks):
            watched.started_s = time.monotonic() - watched.begun
        if any(process.exitcode not in (None, 0) for process in ranks):
            connection.wait([p.sentinel for p in alive], GRACE_S) if alive else None
            return _failed(watched, *_guilty(watched))
        if not alive:
            return RanksEnded(_reports(watched), started_s=watched.started_s)
        if time.monotonic() - watched.begun > watched.spec.time_limit_s:
            return _failed(watched, *_hanging(watched))
        report(
            Progress(what=f"{len(alive)} of {len(ranks)} ranks at work", done=len(ranks) - len(alive), total=len(ranks))
        )
        connection.wait([process.sentinel for process in alive], 0.01 if not watched.started_s else POLL_S)


def _guilty(watched: _Watched) -> tuple[int, Failure]:
    """The rank that died without a word, else the one whose error no other rank caused."""
    reports = _reports(watched)
    dead = [rank for rank, process in enumerate(watched.ranks) if process.exitcode not in (None, 0)]
    silent_dead = [rank for rank in dead if rank not in reports]
    if silent_dead:
        rank = silent_dead[0]
        return rank, _death(rank, watched.ranks[rank].exitcode or 0)
    said = first_failure({rank: reports[rank] for rank in dead})
    assert said is not None, "a rank that died and left a report left a failure"
    return said


def first_failure(reports: dict[int, RankReport]) -> tuple[int, Failure] | None:
    """Of ranks that ended early: the one whose error no other rank caused, and what it said. None: all came through."""
    spoken = {rank: report.failure for rank, report in reports.items() if report.failure is not None}
    own = [rank for rank, failure in spoken.items() if not any(word in failure.sentence for word in BETWEEN_RANKS)]
    if not spoken:
        return None
    rank = (own or list(spoken))[0]
    said = spoken[rank]
    return rank, msgspec.structs.replace(said, sentence=f"Rank {rank} failed: {said.sentence}")


def _death(rank: int, code: int) -> Failure:
    if code >= 0:
        return Failure(
            kind="crash",
            sentence=f"Rank {rank} ended with exit code {code} and left no word.",
            hint="Its last lines stand in the worker's log; run the stage in one process to see the error.",
        )
    name = signal.Signals(-code).name
    memory = " The system ends processes this way when memory runs out." if name == "SIGKILL" else ""
    return Failure(
        kind="out of memory" if name == "SIGKILL" else "crash",
        sentence=f"Rank {rank} was ended by {name}.{memory}",
        hint="Take fewer ranks, a smaller batch, or recompute more blocks.",
    )


def _hanging(watched: _Watched) -> tuple[int, Failure]:
    """At the time limit: the rank that is inside an action for longest; the others wait for it."""
    since = {rank: watched.pulses[rank] for rank in range(len(watched.ranks)) if watched.pulses[rank] != WAITING}
    late = [rank for rank, process in enumerate(watched.ranks) if process.exitcode is None]
    rank = min(since, key=lambda r: since[r]) if since else late[0]
    return rank, Failure(
        kind="time-out",
        sentence=f"Rank {rank} was still at work when the limit of {watched.spec.time_limit_s:g} s was reached.",
        hint="Raise the time limit, or run the stage in one process to see where it stays.",
    )


def _failed(watched: _Watched, rank: int, failure: Failure) -> RanksEnded:
    return RanksEnded(_reports(watched), failure, rank, watched.started_s)


def _reports(watched: _Watched) -> dict[int, RankReport]:
    found = {}
    for rank in range(len(watched.ranks)):
        path = watched.out / f"rank-{rank}.msgpack"
        if path.exists():
            try:
                found[rank] = from_msgpack(path.read_bytes(), RankReport)
            except ExplorerError:
                continue
    return found


def _stop(ranks: list[ForkServerProcess]) -> None:
    """Ends whoever still runs; returns when nobody does."""
    for process in ranks:
        if process.exitcode is None:
            process.kill()
    for process in ranks:
        process.join(timeout=10)
        process.close()


def _end_with_worker(ear: connection.Connection) -> None:
    """Blocks until the worker's end of the pipe is gone."""
    try:
        ear.recv()
    except (EOFError, OSError):
        os._exit(1)


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
    folder.rmdir()


@contextmanager
def results_folder() -> Iterator[Path]:
    """A folder for one run's files, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        yield Path(folder)
