"""One worker for the commands of all files here: a worker takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from explorer.cli.main import listed_verbs
from explorer.engine.bench import measure
from explorer.jobs.client import Job, Worker, _graph_key
from explorer.jobs.protocol import Request, models_of
from explorer.jobs.run_file import is_kept, with_graph
from explorer.jobs.store import Store
from explorer.jobs.worker import answer
from explorer.record.base import to_msgpack
from explorer.record.failure import failure_of
from explorer.record.plan import silent
from tests.cli.asked import TINY, TROUBLE


class InThisProcess(Worker):
    """Runs the engine's answers here: no server imports torch again. test_real_worker.py has processes.

    A request that it has had about the same files gets the job of the first time, unless only the new one is to be kept
    in the store: a verb's text and its document, and verbs about one model, take one run.
    """

    def __init__(self, store_path: Path) -> None:
        super().__init__(store_path)
        self._answered: dict[tuple[object, ...], tuple[Job, bool]] = {}

    def submit(self, request: Request, *, keep: bool = True) -> Job:
        files = [Path(model.target.partition(":")[0]) for model in models_of(request)]
        key = type(request), to_msgpack(request), *(path.read_bytes() for path in files if path.is_file())
        job, stored = self._answered.get(key, (None, False))
        if job is None or (keep and not stored):
            job = Job(self, str(len(self._answered)), request, keep=keep)
            self._answered[key] = job, keep
            try:
                with redirect_stdout(StringIO()):
                    result = answer(request, silent)
                job.result = with_graph(result, self._graphs.get(_graph_key(request)))
                job.run_id = Store(self.store_path).save(job.result) if keep and is_kept(job.result) else None
            except BaseException as error:
                self._finish(job, failure=failure_of(error, in_step=False))
            self._finish(job)
        if job.result is not None:
            self._note_graph(request, job.result)  # a run that follows is stored with its model's graph
        return job


def call_here(function: Callable[..., Any], *arguments: object, report: Any, what: str) -> Any:
    return function(*arguments, report)


def give(patch: pytest.MonkeyPatch, engine: Worker) -> None:
    """Every verb gets `engine` instead of a worker of its own."""

    @contextmanager
    def borrowed(**_: object) -> Iterator[Worker]:
        yield engine

    for name in {module for module, _ in listed_verbs().values()}:
        module = import_module(name)
        if hasattr(module, "worker"):
            patch.setattr(module, "worker", borrowed)


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return InThisProcess(tmp_path_factory.mktemp("runs") / "runs.sqlite")


@pytest.fixture
def shared(engine: Worker, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(measure, "call_in_subprocess", call_here)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # the specs of a card are those of an unset variable
    give(monkeypatch, engine)
    return engine


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    (folder / "tiny.py").write_text(TINY)
    (folder / "wrong.py").write_text(TROUBLE)
    return str(folder / "tiny.py")
