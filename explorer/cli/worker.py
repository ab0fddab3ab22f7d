"""The worker as the command line uses it: progress on stderr, Ctrl-C cancels, a failure is raised."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from explorer.cli.command import CleanConsole, Output, RunFailed, clean, echo, errors_to_stderr, say
from explorer.errors import NotSaved
from explorer.jobs import run_file
from explorer.jobs.client import Job, Worker, WorkerHere
from explorer.jobs.protocol import Measure, MeasureRanks, Request
from explorer.jobs.worker import ENGINE
from explorer.record.base import Record
from explorer.record.failure import Failure
from explorer.record.measurement import Measurement, RecordedRanks

_POLL_S = 0.1
_ONE_JOB = replace(ENGINE, warm=ENGINE.warm[:1])
"""A command waits for the modules of its own job, and for no others."""


@contextmanager
def worker() -> Iterator[Worker]:
    """A worker for this command, which loads torch at once and ends with the context."""
    worker = Worker(program=_ONE_JOB) if hasattr(os, "fork") else WorkerHere()
    try:
        worker.warm()
        yield worker
    finally:
        worker.close()


@dataclass(frozen=True)
class PartView:
    """How a verb shows a result that is not complete."""

    table: Callable[[Any], RenderableType]
    """Drawn above the progress on a terminal while the job runs."""
    cut_off: Callable[[Any], None]
    """Prints the last part of a job that failed or was cancelled; the error follows."""


def ask(worker: Worker, request: Request, *, keep: bool = False, parts: PartView | None = None) -> Any:
    """The result of a request. Raises RunFailed; Ctrl-C cancels the run and is raised again."""
    job = worker.submit(request, keep=keep)
    try:
        _follow(job, parts)
    except KeyboardInterrupt:
        job.cancel()
        job.wait()
        raise
    finally:
        if job.failure is not None and job.part is not None and parts is not None:
            parts.cut_off(job.part)
    if job.failure is not None:
        raise RunFailed(job.failure)
    if job.warning:
        say(f"[yellow]Warning:[/] {escape(job.warning)}")
    return job.result


def run_of(worker: Worker, request: Measure, *, keep: bool = False) -> Measurement:
    """The run of a step; of a step that ranks share, the run of the fullest rank. Raises RunFailed."""
    if request.spec.ranks is not None:
        ranks: RecordedRanks = ask(worker, MeasureRanks(spec=request.spec, without_data=request.without_data))
        return ranks.fullest
    run: Measurement = ask(worker, request, keep=keep)
    return run


def finish(record: Record, failure: Failure | None, save: Path | None, output: Output) -> None:
    """After the answer: writes the run as a file that the Runs page imports, and ends with the failure of the run."""
    with errors_to_stderr(output):
        if save is not None:
            run_file.write_file(save, run_file.write(run_file.stored_record(record)))
        if failure is not None:
            raise RunFailed(failure)


def check_writable(*paths: Path | None) -> None:
    """Checks paths before a long run: raises NotSaved for a path whose folder does not exist."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            what = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is not a folder"
            raise NotSaved(f"{path} cannot be written: it {what}.", hint="Give another path.")


def make_folder(path: Path) -> None:
    """With all above it, unless it is there. Raises NotSaved with the system's reason."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotSaved(f"{path} could not be made: {error.strerror}.", hint="Give another folder.") from error


def print_or_write(text: str, path: Path | None) -> None:
    """Writes to stdout, or whole into a file and names it on stderr. Raises NotSaved."""
    if path is None:
        echo(text)
    else:
        run_file.write_file(path, text.encode())
        say(f"Wrote {escape(str(path))}.")


def _follow(job: Job, parts: PartView | None) -> None:
    console = CleanConsole(stderr=True)
    if console.is_terminal:
        _draw(job, console, parts)
        return
    printed = ""
    while not job.wait(_POLL_S):
        if job.progress.what != printed:
            printed = job.progress.what
            print(clean(printed), file=console.file, flush=True)


class _Bar(Bar):
    """A bar below the table of a part."""

    table: RenderableType | None = None

    def get_renderables(self) -> Iterator[RenderableType]:
        """The table, if there is one, and the bar."""
        if self.table is not None:
            yield self.table
        yield from super().get_renderables()


def _draw(job: Job, console: Console, parts: PartView | None) -> None:
    columns = TextColumn("{task.description}", markup=False), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn()
    with _Bar(SpinnerColumn(), *columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        while not job.wait(_POLL_S):
            progress = job.progress
            if parts is not None and job.part is not None:
                bar.table = parts.table(job.part)
            bar.update(task, description=progress.what, completed=progress.done, total=progress.total or None)
