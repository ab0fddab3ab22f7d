"""The app's side of the pipe: one worker process, started when first needed and again after it ended.

`subprocess`, never `multiprocessing`: a spawned or forked child would run the Streamlit script again. Neither streamlit
nor torch here. Several threads and tabs may hold the same job.

    waiting ──▶ began ──▶ finished: `result`, or `failure` (model raised, out of memory, cancelled, crash, ...)
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from explorer.errors import ExplorerError
from explorer.jobs.child import Child, worker_command
from explorer.jobs.failures import crash, failure_of_job
from explorer.jobs.protocol import (
    RESULTS,
    CancelJob,
    EndJob,
    Event,
    Failed,
    Finished,
    Reported,
    Request,
    Submit,
    description_of,
    models_of,
    run_for,
    specs_of,
    time_limit_s,
)
from explorer.jobs.store import default_path
from explorer.record.base import Record, from_msgpack, from_plain, to_plain
from explorer.record.failure import Failure
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Progress
from explorer.record.run import RunSpec

GRACE_S = 2.0
"""Between the polite word to a run that shall end, and the kill."""
_LAST_GRACE_S = 20.0
"""Between the word that a job's process be killed, and the end of the worker."""
_MOST_FINISHED = 32
_MOST_GRAPHS = 8
_MOST_ATTEMPTS = 2
"""A job that had not begun when the worker ended is handed to the next one, once."""


class Job:
    """A request that the worker answers. Any thread may read any attribute at any time."""

    def __init__(self, worker: Worker, job_id: str, request: Request, *, keep: bool) -> None:
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
        self._worker = worker
        self._keep = keep
        self._finished = threading.Event()
        self._submitted = time.monotonic()
        self._ended: float | None = None
        self._began = False
        self._n_attempts = 0
        self._child: Child | None = None
        self._if_killed: Failure | None = None
        self._timers: list[threading.Timer] = []

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    @property
    def began(self) -> bool:
        """False while it waits for the worker to start or for another job to end."""
        return self._began

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
    """Does jobs one after another in a child process, which starts with the first job or with `warm`."""

    def __init__(
        self, store_path: Path | str | None = None, *, command: Sequence[str] = (), grace_s: float = GRACE_S
    ) -> None:
        self.store_path = Path(store_path) if store_path is not None else default_path()
        self._command = tuple(command) or worker_command(self.store_path)
        self._grace_s = grace_s
        self._lock = threading.RLock()
        self._child: Child | None = None
        self._closed = False
        self._jobs: dict[str, Job] = {}
        self._graphs: dict[str, ModelGraph] = {}
        self._numbers = itertools.count(1)

    def submit(self, request: Request, *, keep: bool = True) -> Job:
        """Returns at once. With `keep` a finished run is in the store before the job is finished.

        Raises BadInput if a text of the request cannot be written, UnreadableFile for a run specification beyond its
        limits.
        """
        for spec in specs_of(request):
            from_plain(to_plain(spec), RunSpec)
        with self._lock:
            # The random part distinguishes the app's jobs from jobs of an earlier app, whose ids are still in URLs.
            job = Job(self, f"{next(self._numbers)}-{secrets.token_hex(3)}", request, keep=keep)
            self._hand_over(job)
            self._jobs[job.id] = job
            self._forget()
        return job

    def job(self, job_id: str) -> Job | None:
        """The job of that id; None: unknown here, or finished long ago."""
        with self._lock:
            return self._jobs.get(job_id)

    def open_jobs(self) -> tuple[Job, ...]:
        """Unfinished jobs in the order of submission: the first job runs, the others wait."""
        with self._lock:
            return tuple(job for job in self._jobs.values() if not job.finished)

    def warm(self) -> None:
        """Starts the child now, so that torch loads while a person reads."""
        with self._lock:
            if self._child is None and not self._closed:
                self._child = Child(self._command, self._heard, self._ended)

    def close(self) -> None:
        """Ends the worker process; open jobs end as cancelled. Returns when the process is gone."""
        with self._lock:
            self._closed = True
            child = self._child
        if child is not None:
            child.close()

    def _hand_over(self, job: Job) -> None:
        self.warm()
        job._n_attempts += 1
        job._child = self._child
        if self._child is None:
            self._finish(job, failure=_cancelled("The worker was closed."))
        else:
            graph = self._graphs.get(_graph_key(job.request))
            self._child.send(Submit(job=job.id, request=job.request, keep=job._keep, graph=graph))

    def _heard(self, child: Child, event: Event) -> None:
        with self._lock:
            job = self._jobs.get(event.job)
            if job is None or job.finished:
                return
            if isinstance(event, Reported):
                self._note_progress(job, event.progress)
            elif isinstance(event, Failed):
                self._finish(job, failure=job._if_killed or event.failure)
        if isinstance(event, Finished):  # outside the lock: a long timeline takes a while to read
            self._receive(job, event)
        elif isinstance(event, Reported) and event.progress.part:
            job.part = from_msgpack(event.progress.part, RESULTS[type(job.request)])
            with self._lock:
                self._note_graph(job.request, job.part)

    def _note_progress(self, job: Job, progress: Progress) -> None:
        job.progress = progress
        if not job._began:
            job._began = True
            limit_s = time_limit_s(job.request)
            sentence = f"The run took longer than its time limit of {limit_s:g} s and was ended."
            hint = "Take a smaller size or fewer repeats, or raise the time limit."
            self._kill_later(job, limit_s + self._grace_s, Failure(kind="time-out", sentence=sentence, hint=hint))

    def _receive(self, job: Job, event: Finished) -> None:
        try:
            result = from_msgpack(event.result, RESULTS[type(job.request)])
        except ExplorerError as error:
            self._finish(job, failure=failure_of_job(error))
            return
        with self._lock:
            job.result, job.run_id, job.warning = result, event.run_id, event.warning
            self._note_graph(job.request, result)
            self._finish(job)
            for other in [other for other in self.open_jobs() if not other._began]:
                if (run := run_for(other.request, result)) is not None and other._child is not None:
                    other._child.send(CancelJob(job=other.id))
                    other.result = run
                    self._finish(other)

    def _note_graph(self, request: Request, result: Record) -> None:
        graph = result.graph if isinstance(result, Measurement) else result
        if isinstance(graph, ModelGraph):
            self._graphs[_graph_key(request)] = graph
            for key in tuple(self._graphs)[:-_MOST_GRAPHS]:
                del self._graphs[key]

    def _cancel(self, job: Job) -> None:
        with self._lock:
            if job.finished or job._child is None:
                return
            job._child.send(CancelJob(job=job.id))
            self._kill_later(job, self._grace_s, _cancelled("The run was cancelled."))

    def _kill_later(self, job: Job, seconds: float, failure: Failure) -> None:
        timer = threading.Timer(seconds, self._kill, (job, failure))
        timer.daemon = True
        job._timers.append(timer)
        timer.start()

    def _kill(self, job: Job, failure: Failure) -> None:
        """Kills the job's process; a second call also kills the worker."""
        with self._lock:
            if job.finished:
                return
            if not job._began or job._child is None:
                self._finish(job, failure=failure)
            elif job._if_killed is None:
                job._if_killed = failure
                job._child.send(EndJob(job=job.id))
                self._kill_later(job, _LAST_GRACE_S, failure)
            else:
                job._child.kill()

    def _ended(self, child: Child, return_code: int, last_words: str) -> None:
        with self._lock:
            if self._child is child:
                self._child = None
            for job in [job for job in self.open_jobs() if job._child is child]:
                if job._if_killed is not None:
                    self._finish(job, failure=job._if_killed)
                elif self._closed:
                    self._finish(job, failure=_cancelled("The worker was closed while the run was under way."))
                elif job._began or job._n_attempts >= _MOST_ATTEMPTS:
                    self._finish(job, failure=crash(return_code, description_of(job.request), last_words))
                else:
                    self._hand_over(job)

    def _finish(self, job: Job, *, failure: Failure | None = None) -> None:
        for timer in job._timers:
            timer.cancel()
        job._timers.clear()
        job.failure = failure
        job._ended = time.monotonic()
        job._finished.set()

    def _forget(self) -> None:
        """Drops old jobs, as results are large: a page uses the newest results, and the store has the rest."""
        finished = [job.id for job in self._jobs.values() if job.finished]
        for job_id in finished[: max(0, len(finished) - _MOST_FINISHED)]:
            del self._jobs[job_id]


def _graph_key(request: Request) -> str:
    """Key of the model's graph, equal for a description of a model and for runs of the model."""
    return repr((getattr(request, "without_data", False), models_of(request)[:1]))


def _cancelled(sentence: str) -> Failure:
    return Failure(kind="cancelled", sentence=sentence)
