"""One warm worker for all commands of a test file: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules

import pytest

from explorer.cli import verbs
from explorer.jobs.client import Worker


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Each run is a process of its own all the same."""
    worker = Worker(tmp_path_factory.mktemp("runs") / "runs.sqlite")
    yield worker
    worker.close()


@pytest.fixture
def shared(engine: Worker, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """The worker that every verb gets instead of one of its own."""

    @contextmanager
    def borrowed() -> Iterator[Worker]:
        yield engine

    for listed in iter_modules(verbs.__path__):
        module = import_module(f"{verbs.__name__}.{listed.name}")
        if hasattr(module, "worker"):
            monkeypatch.setattr(module, "worker", borrowed)
    return engine
