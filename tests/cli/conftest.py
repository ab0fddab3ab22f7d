"""One worker for the commands of all files here, and each verb's docstring read once: both take seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from explorer.cli import main, verbs
from explorer.jobs.client import Job, Worker
from explorer.jobs.protocol import Request
from explorer.jobs.worker import ENGINE
from explorer.record.base import to_msgpack
from tests.cli.asked import TINY, TROUBLE

NOTHING_AHEAD = replace(ENGINE, warm=())
"""The server imports what jobs need, when they need it."""


@pytest.fixture(scope="package", autouse=True)
def docstrings_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "_docstring", cache(main._docstring))
        yield


class Remembering(Worker):
    """Answers a request that it has had with the job of the first time, unless only the new one is to be kept in the
    store: a verb's text and its document, and verbs about one model, take one run."""

    def __init__(self, store_path: Path) -> None:
        super().__init__(store_path, program=NOTHING_AHEAD)
        self._answered: dict[tuple[type, bytes], tuple[Job, bool]] = {}

    def submit(self, request: Request, *, keep: bool = True) -> Job:
        key = type(request), to_msgpack(request)
        job, kept = self._answered.get(key, (None, False))
        if job is None or not job.finished or (keep and not kept):
            job = super().submit(request, keep=keep)
            self._answered[key] = job, keep
        elif job.result is not None:
            self._note_graph(request, job.result)  # a run that follows is stored with its model's graph
        return job


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Each run is a process of its own all the same."""
    worker = Remembering(tmp_path_factory.mktemp("runs") / "runs.sqlite")
    yield worker
    worker.close()


@pytest.fixture
def shared(engine: Worker, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """The worker that every verb gets instead of one of its own."""

    @contextmanager
    def borrowed(**_: object) -> Iterator[Worker]:
        yield engine

    for listed in iter_modules(verbs.__path__):
        module = import_module(f"{verbs.__name__}.{listed.name}")
        if hasattr(module, "worker"):
            monkeypatch.setattr(module, "worker", borrowed)
    return engine


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    (folder / "tiny.py").write_text(TINY)
    (folder / "wrong.py").write_text(TROUBLE)
    return str(folder / "tiny.py")
