"""What one model patches, leaks or breaks does not reach the next run: the same bits and bytes as in a fresh worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from explorer.jobs.client import Job, Worker
from explorer.jobs.protocol import Describe, Measure
from explorer.record.base import to_plain
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.jobs import hostile_nets
from tests.jobs.test_client import finish, wait_gone

Picture = tuple[str, Any]
NETS = Path(hostile_nets.__file__)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def hostile(worker: Worker, name: str) -> Job:
    return finish(worker.submit(Describe(model=ModelRef(target=f"{NETS}:hostile", arguments={"name": name}))))


def bits_and_bytes(worker: Worker, path: Path) -> Picture:
    """What a plain run leaves: parameters and gradients of every step, and the record without its times."""
    path.write_text("")
    model = ModelRef(target=f"{NETS}:plain", arguments={"path": str(path)})
    spec = RunSpec(model=model, policy=Policy.recompute(["0", "3"]), optimizer="adamw", n_repeats=1)
    job = finish(worker.submit(Measure(spec=spec), keep=False))
    assert isinstance(job.result, Measurement), job.failure
    assert job.result.failure is None
    record = to_plain(replace(job.result, times=None, blocks=()))
    record |= record.pop("allocations")
    del record["time_ns"], record["free_memory_bytes"]
    return path.read_text(), record


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Picture]:
    """What the run gives in a worker that has seen nothing else; twice, for it has to be a fixed thing."""
    path = tmp_path_factory.mktemp("bits") / "bits"
    found = []
    for _ in range(2):
        worker = Worker()
        found.append(bits_and_bytes(worker, path))
        worker.close()
    assert found[0] == found[1] and found[0][0].count("gradient") >= 3
    return path, found[0]


@pytest.mark.parametrize("name", list(hostile_nets.HOSTILE))
def test_the_run_after_it_is_that_of_a_fresh_worker(worker: Worker, fresh: tuple[Path, Picture], name: str) -> None:
    hostile(worker, name)
    path, expected = fresh
    bits, record = bits_and_bytes(worker, path)
    assert bits == expected[0]
    assert not {key: (value, expected[1][key]) for key, value in record.items() if value != expected[1][key]}


def test_a_daemon_of_a_model_is_gone_with_its_run(worker: Worker, tmp_path: Path) -> None:
    model = ModelRef(target=f"{NETS}:daemon", arguments={"path": str(tmp_path / "pid")})
    assert finish(worker.submit(Describe(model=model))).failure is None
    wait_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("name", "words"), [("the fork server killed", "fork server"), ("its own group killed", "SIGKILL")]
)
def test_a_process_ended_from_outside_is_a_crash_with_a_sentence(worker: Worker, name: str, words: str) -> None:
    failure = hostile(worker, name).failure
    assert failure is not None and (failure.kind, words in failure.sentence) == ("crash", True), failure
