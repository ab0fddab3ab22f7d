"""One warm worker for the commands of all files here: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from explorer.cli import verbs
from explorer.jobs.client import Worker
from tests.cli.asked import TINY, TROUBLE


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Each run is a process of its own all the same."""
    worker = Worker(tmp_path_factory.mktemp("runs") / "runs.sqlite")
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


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    (tmp_path / "wrong.py").write_text(TROUBLE)
    return str(path)
