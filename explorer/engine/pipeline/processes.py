"""Ranks as processes of this machine: started from a warm fork server, watched, and ended with this process.

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
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from explorer.child_process.forks import Forked, n_oom_kills, server_is_gone
from explorer.engine.device.subprocess_call import rank_processes, wait_for_ranks
from explorer.plan.export.torchrun import report_file
from explorer.record.base import from_json, from_msgpack, to_json
from explorer.record.failure import Failure
from explorer.record.pipeline import RankReport
from explorer.record.plan import Report, silent
from explorer.record.run import RunSpec

GRACE_S = 1.0
"""Time for the other ranks to report after a rank has failed."""
WAITING = -1
BETWEEN_RANKS = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "TCPStore", "Broken pipe")
"""Words of an error that another rank's end caused."""


FailedRank = tuple[int, Failure]


def run_ranks(
    spec: RunSpec, n_ranks: int, out: Path, report: Report = silent
) -> tuple[dict[int, RankReport], FailedRank | None]:
    """Runs every rank of `spec` to its end, or to the first failure; results are files in `out`.

    Returns the reports of the ranks, and the rank that failed first. Raises Cancelled, after all have stopped.
    """
    n_oom_kills_before = n_oom_kills()
    failed: FailedRank | None = None
    with tempfile.TemporaryDirectory(prefix="ranks-") as meeting:
        pulses = _pulses(Path(meeting), n_ranks)
        arguments = [(to_json(spec), rank, n_ranks, meeting, str(out)) for rank in range(n_ranks)]
        with rank_processes(rank_process, arguments, ["explorer.engine.pipeline.rank"]) as ranks:
            if not wait_for_ranks(ranks, spec.time_limit_s, report):
                failed = _hanging(spec, ranks, pulses)
            elif any(process.ended and process.code != 0 for process in ranks):
                select.select([process for process in ranks if not process.ended], [], [], GRACE_S)
                failed = guilty(ranks, reports_in(out), n_oom_kills_before)
    return reports_in(out), failed


def reports_in(folder: Path) -> dict[int, RankReport]:
    """The reports that ranks left in `folder`, by rank."""
    files = folder.glob(report_file(folder, "*").name)
    reports = (from_msgpack(file.read_bytes(), RankReport) for file in files)
    return {report.rank: report for report in sorted(reports, key=lambda report: report.rank)}


def rank_process(spec_json: bytes, rank: int, n_ranks: int, meeting: str, out: str) -> None:
    """Body of one rank's process. `meeting` is the folder where the ranks find each other."""
    import torch.distributed as dist

    from explorer.engine.pipeline.rank import failed_report, join, run_rank, write_report

    spec, pulses = from_json(spec_json, RunSpec), _pulses(Path(meeting), n_ranks)
    action = ""

    def announce(name: str) -> None:
        """A pulse for the watch: when the action began, in seconds; WAITING between actions."""
        nonlocal action
        action = name
        pulses[rank] = int(time.monotonic()) if name else WAITING

    try:
        join(spec, rank, init_method=f"file://{meeting}/store", rank=rank, world_size=n_ranks)
        run_rank(spec, Path(out), announce)
    except BaseException as error:
        write_report(failed_report(spec, rank, error, action), Path(out))
        # Not sys.exit: a peer's death leaves threads of the transport that would wait for ever.
        os._exit(1)
    dist.destroy_process_group()


def _pulses(meeting: Path, n_ranks: int) -> memoryview:
    """The last pulse of each rank, shared by all."""
    path = meeting / "pulses"
    if not path.exists():
        path.write_bytes(WAITING.to_bytes(8, sys.byteorder, signed=True) * n_ranks)
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def guilty(ranks: Sequence[Forked], reports: dict[int, RankReport], n_oom_kills_before: int | None) -> FailedRank:
    """The rank that died without a report, else the one whose error no other rank caused.

    A rank that is killed after its last action leaves a report without a failure.
    """
    dead = [rank for rank, process in enumerate(ranks) if process.ended and process.code != 0]
    without_report = [rank for rank in dead if rank not in reports]
    failed = first_failure({rank: reports[rank] for rank in dead if rank in reports})
    if failed is not None and not without_report:
        return failed
    rank, now = (without_report or dead)[0], n_oom_kills()
    memory_ran_out = None if now is None or n_oom_kills_before is None else now > n_oom_kills_before
    return rank, _death(rank, ranks[rank].code, memory_ran_out)


def _hanging(spec: RunSpec, ranks: Sequence[Forked], pulses: memoryview) -> FailedRank:
    """At the time limit: the rank that is inside an action for longest; the others wait for it."""
    since = {rank: pulse for rank, pulse in enumerate(pulses) if pulse != WAITING}
    late = [rank for rank, process in enumerate(ranks) if not process.ended]
    rank = min(since, key=lambda r: since[r]) if since else late[0]
    return rank, Failure(
        kind="time-out",
        sentence=f"Rank {rank} was still at work when the limit of {spec.time_limit_s:g} s was reached.",
        hint="Raise the time limit, or run the stage in one process to see where it stays.",
    )


def first_failure(reports: dict[int, RankReport]) -> FailedRank | None:
    """The rank that ended early by an error no other rank caused, with its failure; None if no rank failed."""
    failures = {rank: report.failure for rank, report in reports.items() if report.failure is not None}
    if not failures:
        return None
    causes = [rank for rank, failure in failures.items() if not any(word in failure.sentence for word in BETWEEN_RANKS)]
    rank = (causes or list(failures))[0]
    failure, action = failures[rank], reports[rank].failed_action
    sentence = f"Rank {rank} failed{f' in {action}' if action else ''}: {failure.sentence}"
    return rank, replace(failure, sentence=sentence)


def _death(rank: int, code: int | None, memory_ran_out: bool | None) -> Failure:
    """`memory_ran_out`: whether the system says so; None: it does not say."""
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
    False: "It was ended from outside; the system's memory did not run out. Run it again.",
    None: "It was ended from outside, by a person or by the system when memory runs out. Run it again.",
}
