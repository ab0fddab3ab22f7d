"""A worker whose verbs are fake, with a store of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorer.jobs.client import Worker
from tests.jobs.samples import FAKE


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "runs.sqlite"


@pytest.fixture
def worker(store_path: Path) -> Iterator[Worker]:
    worker = Worker(store_path, command=(sys.executable, str(FAKE), str(store_path)), grace_s=0.3)
    yield worker
    worker.close()
