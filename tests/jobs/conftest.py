"""A worker whose jobs are fake, with a store of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from explorer.jobs.client import Worker
from tests.jobs.fake_worker import FAKE


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("store") / "runs.sqlite", program=FAKE, grace_s=0.3)
    yield worker
    worker.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Worker]:
    """A worker for one test."""
    worker = Worker(tmp_path / "runs.sqlite", program=FAKE, grace_s=0.3)
    yield worker
    worker.close()
