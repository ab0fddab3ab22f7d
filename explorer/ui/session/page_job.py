"""The life of a page's job in the worker: start, look, settle, fail, cancel, forget.

    start ──▶ under way ──▶ settle: the page takes the result, or the failure stays there until the next start
                 ├── take_part: a part of the result has arrived, the job goes on
                 ├── cancel ──▶ cancelling ──▶ settle
                 └── the app was started again ──▶ forget, and say so

The address bar names the job (`?job=`), so that a refresh finds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer

import streamlit as st

from explorer.errors import ExplorerError
from explorer.jobs.client import Job
from explorer.jobs.protocol import ROWS, Request, models_of, specs_of
from explorer.record.base import Record
from explorer.record.failure import Failure
from explorer.ui.session import backend
from explorer.ui.session.repository import runs
from explorer.ui.session.values import whole

Take = Callable[[Job], None]
"""Puts the result of a finished job onto its page."""
LOST = Failure(kind="crash", sentence="The app was restarted while this ran.", hint="Run it again.")


UNCLAIMED_S = 60.0
"""A window claims the job of its visit within this time, also on a busy machine."""


@dataclass(slots=True, kw_only=True)
class PageJob:
    """The worker's job for a page. `requested` and `failure` begin and end with a job."""

    id: str | None = None
    """The job under way; None: there is none, and the next may start."""
    what: str = ""
    """Name of the job's request, as `Compare`."""
    requested: bool = False
    """Run was pressed, and the job has not started yet."""
    part: Record | None = None
    """The part of the job's result that the page has taken over last."""
    cancelling: bool = False
    """Cancel was pressed, and the job has not ended yet."""
    failure: Failure | None = None
    """Reason why the last job has no result, or why the last input was refused."""
    refused: bool = False
    """True if `failure` is about an input of a person: no run failed."""

    @property
    def run_failed(self) -> bool:
        """True if the last job has no result."""
        return self.failure is not None and not self.refused


def attach(life: PageJob, page: str) -> None:
    """Restores, after a refresh, the job from the address bar if `page` starts such jobs."""
    job_id = st.query_params.get("job")
    job = backend.worker().job(job_id) if job_id and life.id is None else None
    if job is not None and page in ROWS[type(job.request)].pages:
        life.id, life.what = job.id, type(job.request).__name__
    _name_in_address(life)


def start(life: PageJob, request: Request) -> None:
    """Hands `request` to the worker, unless a job is under way. An error becomes the failure."""
    if life.id is not None:  # a button that was drawn before that started
        return
    life.failure, life.cancelling = None, False
    with refusing(life):
        life.id, life.what = submit(request).id, type(request).__name__
    life.refused = False
    _name_in_address(life)


def submit(request: Request) -> Job:
    """The job of `request` in the worker. Raises BadInput for a model that is not offered.

    Equal requests of several windows are one job. A window that cancels the job cancels it for all windows.
    """
    for model in models_of(request):
        backend.check_offered(model)
    for spec in specs_of(request):
        backend.check_split(spec)
    job = next((job for job in backend.worker().open_jobs() if job.request == request and not job.cancelled), None)
    if job is None:
        backend.free_worker()
        predicted = getattr(request, "without_data", False)  # no run: the list of runs has none of it
        job = backend.worker().submit(request, keep=not predicted)
    return job


def submit_early(request: Request) -> None:
    """Submits what a visit will request. The job is cancelled unless a window has claimed it UNCLAIMED_S later."""
    job = submit(request)
    timer = Timer(UNCLAIMED_S, _cancel_unclaimed, (job,))
    timer.daemon = True
    timer.start()


def _cancel_unclaimed(job: Job) -> None:
    if not job.claimed:
        job.cancel()


def running(life: PageJob) -> Job | None:
    """The job under way, else None. A finished job is under way until `settle` takes its result."""
    if life.id is None:
        return None
    job = backend.worker().job(life.id)
    if job is None:
        forget(life)
        life.failure, life.refused = LOST, False
    else:
        job.claimed = True
    return job


def settle(life: PageJob, take: Take) -> bool:
    """Hands a job that has finished to `take`, or keeps its failure. Returns whether there was one."""
    job = running(life)
    if job is None or not job.finished:
        return False
    with whole():
        forget(life)
        life.failure, life.refused = job.failure, False
        if job.failure is None:
            take(job)
    return True


def take_part(life: PageJob, take: Take) -> bool:
    """Hands a job to `take` whose result has a part that the page has not taken over. Returns whether there was one."""
    job = running(life)
    if job is None or job.part is None or job.part is life.part:
        return False
    with whole():
        life.part = job.part
        take(job)
    return True


def under_way(life: PageJob, take: Take) -> Job | None:
    """The job under way, after the result of a finished one was taken."""
    return None if settle(life, take) else running(life)


def cancel(life: PageJob) -> None:
    """Cancels the job, which ends within seconds with a failure of the kind cancelled."""
    if (job := running(life)) is not None:
        life.cancelling = True
        job.cancel()


def refuse(life: PageJob, error: ExplorerError) -> None:
    """Keeps why an input was refused: the reason stays on the page until the next run."""
    life.failure, life.refused = Failure(kind="bad input", sentence=error.sentence, hint=error.hint), True


@contextmanager
def refusing(life: PageJob) -> Iterator[None]:
    """A context that ends at an ExplorerError and keeps the error as a refusal."""
    try:
        yield
    except ExplorerError as error:
        refuse(life, error)


def forget(life: PageJob) -> None:
    """The page waits for no job any more; why the last one failed stays."""
    life.id, life.what, life.part, life.cancelling = None, "", None, False
    _name_in_address(life)


def record(life: PageJob, key: str | None) -> object:
    """The record under `key`; None without a record. An unreadable record becomes the failure."""
    with refusing(life):
        return runs().record(key)
    return None


def _name_in_address(life: PageJob) -> None:
    job_id = st.query_params.get("job")
    if life.id is not None and job_id != life.id:
        st.query_params["job"] = life.id
    elif life.id is None and job_id is not None:
        del st.query_params["job"]
