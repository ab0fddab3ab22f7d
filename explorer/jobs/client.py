"""The app's side of the worker: jobs run one after another, each in a process that a warm fork server forks.

The server is a `subprocess`, never `multiprocessing`: a spawned or forked child would run the Streamlit script again.
Neither streamlit nor torch here. Several threads and tabs may hold the same job.

    waiting ──▶ began ──▶ finished: `result`, or `failure` (model raised, out of memory, cancelled, crash, ...)
"""

from __future__ import annotations

import atexit
import itertools
import secrets
import shutil
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from pathlib import Path

from msgspec.structs import replace

from explorer.child_process.forks import Answering, Forks
from explorer.errors import ExplorerError
from explorer.jobs import protocol
from explorer.jobs.job_process import JobProcess, new_folder
from explorer.jobs.run_file import KINDS, graph_of, with_graph
from explorer.jobs.store import Store, Turn, default_path
from explorer.jobs.worker import ENGINE, WorkerProgram, answer, event_of, settings
from explorer.record.base import Record, from_msgpack, from_plain, to_msgpack, to_plain
from explorer.record.failure import Failure, failure_of
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Progress
from explorer.record.run import RunSpec

GRACE_S = 2.0
"""Between the polite word to a run that shall end, and the kill."""
_LAST_GRACE_S = 20.0
"""Between the kill of a job's process and the end of the fork server, if the server does not report the process."""
_LOOK_S = 0.05
"""Between two looks whether an equal run of another process has ended."""
_MOST_FINISHED = 32
_MOST_GRAPHS = 8


class Job:
    """A request that the worker answers. Any thread may read any attribute at any time."""

    def __init__(self, worker: Worker, job_id: str, request: protocol.Request, *, keep: bool) -> None:
        self.id = job_id
        self.request = request
        self.progress = Progress(what="waiting for the worker", done=0, total=0)
        self.part: Record | None = None
        """The result as far as it is complete, see `Progress.part`; None before the first part."""
        self.result: Record | None = None
        self.failure: Failure | None = None
        self.run_id: str | None = None
        """Key of the result in the store; None if the store does not keep the result."""
        self.warning = ""
        """Reason why the store could not keep the result."""
        self.cancelled = False
        """True after `cancel`, also while the job still runs."""
        self.claimed = False
        """True once a window, or another caller, waits for the job."""
        self.n_news = 0
        """Grows when the job begins, counts its steps, has a part, and when it has finished."""
        self._worker = worker
        self._keep = keep
        self._finished = threading.Event()
        self._submitted = time.monotonic()
        self._ended: float | None = None
        self._began = False
        """False while it waits for the worker to start or for another job to end."""
        self._process: JobProcess | None = None
        self._if_killed: Failure | None = None
        self._timers: list[threading.Timer] = []

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the job's submission to its end, or to now."""
        return (self._ended or time.monotonic()) - self._submitted

    def cancel(self) -> None:
        """Cancels the job, and kills its process if the job still runs after the grace. Returns at once."""
        self.cancelled = True
        self._worker._cancel(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the job has finished; False if the time is up first."""
        return self._finished.wait(timeout_s)


class Worker:
    """Runs jobs one after another. Its fork server starts with the first job or with `warm`, and again if it ended."""

    def __init__(
        self,
        store_path: Path | str | None = None,
        *,
        program: WorkerProgram = ENGINE,
        grace_s: float = GRACE_S,
    ) -> None:
        self.store_path = Path(store_path) if store_path is not None else default_path()
        self._program, self._grace_s = program, grace_s
        self._changed = threading.Condition()
        self._forks: Forks | None = None
        self._thread: threading.Thread | None = None
        self._folder = ""
        self._closed = False
        self._jobs: dict[str, Job] = {}
        self._graphs: dict[str, ModelGraph] = {}
        self._numbers = itertools.count(1)

    def submit(self, request: protocol.Request, *, keep: bool = True) -> Job:
        """Returns at once. With `keep` a finished run is in the store before the job is finished.

        Raises BadInput if a text of the request cannot be written, UnreadableFile for a run specification beyond its
        limits.
        """
        to_msgpack(request)
        for spec in protocol.specs_of(request):
            from_plain(to_plain(spec), RunSpec)
        with self._changed:
            # The random part distinguishes the app's jobs from jobs of an earlier app, whose ids are still in URLs.
            job = Job(self, f"{next(self._numbers)}-{secrets.token_hex(3)}", request, keep=keep)
            self._jobs[job.id] = job
            self._forget()
            if self._closed:
                self._finish(job, failure=_cancelled("The worker was closed."))
            self.warm()
            self._changed.notify_all()
        return job

    def job(self, job_id: str) -> Job | None:
        """The job of that id; None: unknown here, or finished long ago."""
        with self._changed:
            return self._jobs.get(job_id)

    def open_jobs(self) -> tuple[Job, ...]:
        """Unfinished jobs in the order of submission: the first job runs, the others wait."""
        with self._changed:
            return tuple(job for job in self._jobs.values() if not job.finished)

    def warm(self) -> None:
        """Starts the fork server now, so that torch loads while a person reads."""
        with self._changed:
            if self._closed or (self._forks is not None and self._forks.alive):
                return
            if self._forks is not None:
                self._forks.close()
            self._folder = self._folder or new_folder()
            with self._server_words.open("wb") as errors:
                self._forks = Forks.launch(self._program.warm, settings(), errors.fileno())
            self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            atexit.register(self.close)
            self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)
            self._thread.start()

    @property
    def _server_words(self) -> Path:
        """File of what the fork server itself prints: nothing, unless it breaks."""
        return Path(self._folder, "server.txt")

    def close(self) -> None:
        """Ends all processes; open jobs end as cancelled. Returns when the processes are gone."""
        with self._changed:
            self._closed = True
            for job in self.open_jobs():
                self._finish(job, failure=_cancelled("The worker was closed while the run was under way."))
            self._changed.notify_all()
        if self._forks is not None and self._thread is not None:
            self._forks.close()
            self._thread.join()
            shutil.rmtree(self._folder, ignore_errors=True)
            atexit.unregister(self.close)

    def _work(self) -> None:
        """Runs the jobs, in a thread, until the worker is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.open_jobs())
                if self._closed:
                    return
                job, *_ = self.open_jobs()
            try:
                with self._turn(job) as turn:
                    if not self._has_result(job, turn):
                        self._run(job)
                    if turn is not None:
                        turn.run_id = job.run_id
            except Exception as error:  # no process, a full disk, or a result that cannot be read
                self._finish(job, failure=self._with_words(failure_of(error, in_step=False)))

    def _turn(self, job: Job) -> AbstractContextManager[Turn | None]:
        """The turn of a job whose result is stored; of any other job, none."""
        if job._keep and protocol.ROWS[type(job.request)].result in KINDS.values():
            with suppress(OSError, ValueError):  # a model's name that is no path
                return Turn(self.store_path, protocol.run_key(job.request))
        return nullcontext()

    def _has_result(self, job: Job, turn: Turn | None) -> bool:
        """Waits for the turn of a job. Whether the job is over then: it was cancelled, or an equal run has ended."""
        while turn is not None and not turn.comes():
            job.progress = Progress(what="waiting for an equal run in another window", done=0, total=0)
            if job._finished.wait(_LOOK_S):
                return True
        if turn is not None and turn.run_id is not None:
            with suppress(ExplorerError):  # the run is deleted already
                result = Store(self.store_path).load(turn.run_id)
                self._end(job, protocol.Finished(result=to_msgpack(result), run_id=turn.run_id))
        return job.finished

    def _run(self, job: Job) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder:
            with self._changed:
                graph = self._graphs.get(_graph_key(job.request))
                submitted = protocol.Submit(request=job.request, keep=job._keep, graph=graph)
                job._process = process = JobProcess(submitted, self._start, folder)
                if job.finished:  # cancelled meanwhile
                    process.kill()
                self._heard(job, Progress(what="starting", done=0, total=0))  # before its modules are imported
            try:
                self._end(job, process.answer(lambda event: self._heard(job, event.progress)))
            finally:
                process.close()

    def _start(self, submitted: protocol.Submit, folder: str, cancels: int) -> Answering:
        self.warm()
        arguments = to_msgpack(submitted), str(self.store_path), folder
        needs = self._program.needs(submitted.request)
        return Answering(self._program.run, *arguments, files=[cancels], needs=needs, server=self._forks)

    def _heard(self, job: Job, progress: Progress) -> None:
        with self._changed:
            if job.finished:
                return
            is_news = progress.part or not job._began or (progress.total and not job.progress.total)
            job.progress = progress
            if not job._began:
                job._began = True
                seconds = protocol.time_limit_s(job.request) + self._grace_s
                self._kill_later(job, seconds, failure_of(protocol.timed_out(job.request), in_step=False))
        if progress.part:
            part = from_msgpack(progress.part, protocol.ROWS[type(job.request)].result)
            if job.part is not None and graph_of(part) is None:  # a page that looks late sees the last part alone
                part = with_graph(part, graph_of(job.part))
            job.part = part
            with self._changed:
                self._note_graph(job.request, job.part)
        if is_news:
            job.n_news += 1

    def _end(self, job: Job, answer: protocol.Event) -> None:
        if isinstance(answer, protocol.Failed):
            self._finish(job, failure=job._if_killed or self._with_words(answer.failure))
        elif isinstance(answer, protocol.Finished):
            kind = protocol.ROWS[type(job.request)].result
            result = from_msgpack(answer.result, kind)  # a long timeline takes a while to read
            with self._changed:
                job.result, job.run_id, job.warning = result, answer.run_id, answer.warning
                self._note_graph(job.request, result)
                self._finish(job)
                for other in self.open_jobs():
                    if (run := protocol.run_for(other.request, result)) is not None:
                        other.result = run
                        self._finish(other)

    def _with_words(self, failure: Failure) -> Failure:
        """`failure` with what the fork server printed, if the server has ended."""
        if self._forks is None or self._forks.alive or self._closed:
            return failure
        words = self._server_words.read_text(errors="replace").strip()
        return replace(failure, traceback=f"{failure.traceback}\n{words}".strip())

    def _note_graph(self, request: protocol.Request, result: Record) -> None:
        graph = result.graph if isinstance(result, Measurement) else result
        if isinstance(graph, ModelGraph):
            self._graphs[_graph_key(request)] = graph
            for key in tuple(self._graphs)[:-_MOST_GRAPHS]:
                del self._graphs[key]

    def _cancel(self, job: Job) -> None:
        with self._changed:
            if job._process is None:
                self._finish(job, failure=_cancelled("The run was cancelled before it began."))
            elif not job.finished:
                job._process.cancel()
                # A search has nothing to put away, and its solver does not listen: a visitor's run would wait for it.
                grace_s = 0.0 if isinstance(job.request, protocol.FindPlans) else self._grace_s
                self._kill_later(job, grace_s, _cancelled("The run was cancelled."))

    def _kill_later(self, job: Job, seconds: float, failure: Failure) -> None:
        timer = threading.Timer(seconds, self._kill, (job, failure))
        timer.daemon = True
        job._timers.append(timer)
        timer.start()

    def _kill(self, job: Job, failure: Failure) -> None:
        """Kills the job's process; a second call ends the fork server too."""
        with self._changed:
            if job.finished or job._process is None or self._forks is None:
                return
            end = job._process.kill if job._if_killed is None else self._forks.close
            job._if_killed = job._if_killed or failure
            self._kill_later(job, _LAST_GRACE_S, failure)
        end()  # outside the lock: it may wait for the process to begin

    def _finish(self, job: Job, *, failure: Failure | None = None) -> None:
        with self._changed:
            if job.finished:
                return
            for timer in job._timers:
                timer.cancel()
            job._timers.clear()
            job.failure = failure
            job._ended = time.monotonic()
            job._finished.set()
            job.n_news += 1

    def _forget(self) -> None:
        """Drops old jobs, as results are large: a page uses the newest results, and the store has the rest."""
        finished = [job.id for job in self._jobs.values() if job.finished]
        for job_id in finished[: max(0, len(finished) - _MOST_FINISHED)]:
            del self._jobs[job_id]


def _graph_key(request: protocol.Request) -> str:
    """Key of the model's graph, equal for a description of a model and for runs of the model in equal conditions."""
    spec = getattr(request, "spec", getattr(request, "candidate", None))
    conditions = getattr(request, "conditions", getattr(spec, "conditions", None))
    return repr((getattr(request, "without_data", False), protocol.models_of(request)[:1], conditions))


class WorkerHere(Worker):
    """Runs jobs in this process, on a system that cannot fork: a job takes its memory and its crashes with it."""

    def warm(self) -> None:
        """Nothing is started ahead."""
        with self._changed:
            self._begin()

    def _run(self, job: Job) -> None:
        graph = self._graphs.get(_graph_key(job.request))
        submitted = protocol.Submit(request=job.request, keep=job._keep, graph=graph)
        with redirect_stdout(sys.stderr):
            event = event_of(answer, submitted, str(self.store_path), lambda progress: self._heard(job, progress))
        self._end(job, event)


def _cancelled(sentence: str) -> Failure:
    return Failure(kind="cancelled", sentence=sentence)
