"""Ranks as processes of this machine: started from a warm fork server, watched, and never left behind.

    this process ── fork server (forks.py) ──▶ rank 0 ┐
                                           ──▶ rank 1 ┤ gloo or NCCL
      ▲ ends, pulses                       ──▶ rank 2 ┘
      └── the first rank that dies, or the time limit, ends all of them; the guilty one is named

The fork server ends the ranks when this process is gone, and the kernel does when the fork server is.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from explorer.child_process.forks import Forked, at_hand, server_is_gone
from explorer.engine.device.free_memory import n_oom_kills
from explorer.engine.pipeline.play.rank_files import report_file
from explorer.errors import ExplorerError
from explorer.record.base import from_json, from_msgpack, to_json
from explorer.record.failure import Failure
from explorer.record.pipeline_run import RankReport
from explorer.record.plan import Progress, Report, silent
from explorer.record.run import RunSpec

GRACE_S = 1.0
"""Time for the other ranks to report after a rank has failed."""
POLL_S = 0.2
WAITING = -1
BETWEEN_RANKS = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "TCPStore", "Broken pipe")
"""Words of an error that another rank's end caused."""


@dataclass(frozen=True)
class RanksEnded:
    """Results of the processes: the reports of the ranks, or the first failure and its rank."""

    reports: dict[int, RankReport]
    failure: Failure | None = None
    failed_rank: int | None = None
    started_s: float = 0.0
    """Seconds from the first process's start until all ranks had joined."""


def run_ranks(
    spec: RunSpec, n_ranks: int, out: Path, report: Report = silent, *, joined_only: bool = False
) -> RanksEnded:
    """Runs every rank of `spec` to its end, or to the first failure. Raises Cancelled, after all have stopped.

    `joined_only` stops once the process group exists, to time the start. Results are files in `out`.
    """
    forks, needs = at_hand(), ["explorer.engine.pipeline.play.rank_main"]
    with tempfile.TemporaryDirectory(prefix="ranks-") as meeting:
        pulses = _pulses(Path(meeting), n_ranks)
        watched = _Watched(spec, [], pulses, out, time.monotonic(), n_oom_kills())
        try:
            for rank in range(n_ranks):
                job = RankJob(to_json(spec), rank, n_ranks, meeting, str(out), joined_only)
                watched.ranks.append(forks.start(rank_process, job, needs=needs))
            return _watch(watched, report)
        finally:
            for process in watched.ranks:
                process.kill()
            for process in watched.ranks:
                process.close()


@dataclass(frozen=True)
class RankJob:
    """The order for one rank's process."""

    spec_json: bytes
    rank: int
    n_ranks: int
    meeting: str
    """Folder where the ranks find each other."""
    out: str
    joined_only: bool


def rank_process(job: RankJob) -> None:
    """Body of one rank's process."""
    import torch.distributed as dist

    from explorer.engine.pipeline.play.rank_main import failed, join, run_rank, write_report

    spec, pulses = from_json(job.spec_json, RunSpec), _pulses(Path(job.meeting), job.n_ranks)
    doing = ""

    def announce(name: str) -> None:
        """A pulse for the watcher: when the action began, in seconds; WAITING between actions."""
        nonlocal doing
        doing = name
        pulses[job.rank] = int(time.monotonic()) if name else WAITING

    try:
        join(spec, job.rank, init_method=f"file://{job.meeting}/store", rank=job.rank, world_size=job.n_ranks)
        pulses[job.n_ranks + job.rank] = 1
        if not job.joined_only:
            run_rank(spec, Path(job.out), announce)
    except BaseException as error:
        write_report(failed(spec, job.rank, error, doing), Path(job.out))
        # Not sys.exit: a peer's death leaves threads of the transport that would wait for ever.
        os._exit(1)
    dist.destroy_process_group()


def _pulses(meeting: Path, n_ranks: int) -> memoryview:
    """Two numbers a rank, shared by all: its last pulse, and 1 once it has joined."""
    path = meeting / "pulses"
    if not path.exists():
        path.write_bytes(WAITING.to_bytes(8, sys.byteorder, signed=True) * 2 * n_ranks)
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


@dataclass
class _Watched:
    spec: RunSpec
    ranks: list[Forked]
    pulses: memoryview
    out: Path
    begun: float
    n_oom_kills: int | None
    """How often the system had ended a process for lack of memory before."""
    started_s: float = 0.0

    @property
    def n_joined(self) -> int:
        return sum(self.pulses[len(self.ranks) + rank] == 1 for rank in range(len(self.ranks)))

    @property
    def memory_ran_out(self) -> bool | None:
        """Whether the system says so; None: it does not say."""
        now = n_oom_kills()
        return None if now is None or self.n_oom_kills is None else now > self.n_oom_kills


def _watch(watched: _Watched, report: Report) -> RanksEnded:
    ranks = watched.ranks
    while True:
        alive = [process for process in ranks if not process.ended]
        if not watched.started_s and watched.n_joined == len(ranks):
            watched.started_s = time.monotonic() - watched.begun
        if any(process.code != 0 for process in ranks if process.ended):
            _wait(alive, GRACE_S)
            return _failed(watched, *_guilty(watched))
        if not alive:
            return RanksEnded(_reports(watched), started_s=watched.started_s)
        if time.monotonic() - watched.begun > watched.spec.time_limit_s:
            return _failed(watched, *_hanging(watched))
        report(
            Progress(what=f"{len(alive)} of {len(ranks)} ranks at work", done=len(ranks) - len(alive), total=len(ranks))
        )
        _wait(alive, 0.01 if not watched.started_s else POLL_S)


def _wait(processes: Sequence[Forked], seconds: float) -> None:
    """Until there is news of one of them."""
    select.select(processes, [], [], seconds)


def _guilty(watched: _Watched) -> tuple[int, Failure]:
    """The rank that died without a report, else the one whose error no other rank caused.

    A rank that is killed after its last action leaves a report without a failure.
    """
    reports = _reports(watched)
    dead = [rank for rank, process in enumerate(watched.ranks) if process.ended and process.code != 0]
    silent_dead = [rank for rank in dead if rank not in reports]
    failed = first_failure({rank: reports[rank] for rank in dead if rank in reports})
    if failed is not None and not silent_dead:
        return failed
    rank = (silent_dead or dead)[0]
    return rank, _death(rank, watched.ranks[rank].code, watched.memory_ran_out)


def first_failure(reports: dict[int, RankReport]) -> tuple[int, Failure] | None:
    """The rank that ended early by an error no other rank caused, with its failure; None if no rank failed."""
    spoken = {rank: report.failure for rank, report in reports.items() if report.failure is not None}
    own = [rank for rank, failure in spoken.items() if not any(word in failure.sentence for word in BETWEEN_RANKS)]
    if not spoken:
        return None
    rank = (own or list(spoken))[0]
    failure, where = spoken[rank], reports[rank].failed_action
    sentence = f"Rank {rank} failed{f' in {where}' if where else ''}: {failure.sentence}"
    return rank, msgspec.structs.replace(failure, sentence=sentence)


def _death(rank: int, code: int | None, memory_ran_out: bool | None) -> Failure:
    if code is None:
        gone = server_is_gone()
        return Failure(kind="crash", sentence=f"Rank {rank} ended early. {gone.sentence}", hint=gone.hint)
    if code >= 0:
        return Failure(
            kind="crash",
            sentence=f"Rank {rank} ended with exit code {code} and left no word.",
            hint="Its last lines stand in the worker's log; run the stage in one process to see the error.",
        )
    sentence = f"Rank {rank} was ended by {signal.Signals(-code).name}."
    if -code == signal.SIGKILL and memory_ran_out:
        hint = "Take fewer ranks, a smaller batch, or recompute more blocks."
        return Failure(kind="out of memory", sentence=f"{sentence} The system's memory had run out.", hint=hint)
    hint = "Run it again; in one process the error shows." if -code != signal.SIGKILL else _KILLED[memory_ran_out]
    return Failure(kind="crash", sentence=sentence, hint=hint)


_KILLED = {
    False: "Somebody ended it from outside; the system's memory did not run out. Run it again.",
    None: "It was ended from outside, by a person or by the system when memory runs out. Run it again.",
}


def _hanging(watched: _Watched) -> tuple[int, Failure]:
    """At the time limit: the rank that is inside an action for longest; the others wait for it."""
    since = {rank: watched.pulses[rank] for rank in range(len(watched.ranks)) if watched.pulses[rank] != WAITING}
    late = [rank for rank, process in enumerate(watched.ranks) if not process.ended]
    rank = min(since, key=lambda r: since[r]) if since else late[0]
    return rank, Failure(
        kind="time-out",
        sentence=f"Rank {rank} was still at work when the limit of {watched.spec.time_limit_s:g} s was reached.",
        hint="Raise the time limit, or run the stage in one process to see where it stays.",
    )


def _failed(watched: _Watched, rank: int, failure: Failure) -> RanksEnded:
    return RanksEnded(_reports(watched), failure, rank, watched.started_s)


def _reports(watched: _Watched) -> dict[int, RankReport]:
    reports = {}
    for rank in range(len(watched.ranks)):
        path = report_file(watched.out, rank)
        if path.exists():
            try:
                reports[rank] = from_msgpack(path.read_bytes(), RankReport)
            except ExplorerError:
                continue
    return reports


@contextmanager
def results_folder() -> Iterator[Path]:
    """A folder for one run's files, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        yield Path(folder)
