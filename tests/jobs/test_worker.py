"""What one model patches, leaks or breaks does not reach the next run: the same bits and bytes as in a fresh worker."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import stat
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec.structs import replace

from explorer.child_process.forks import WARM
from explorer.jobs.client import Job, Worker
from explorer.jobs.protocol import ROWS, Compare, Describe, DrawAutograd, Measure, Request
from explorer.jobs.worker import ALL_WARM, ENGINE, needs_of, settings
from explorer.record import Measurement, ModelRef, Policy, RunSpec
from explorer.record.base import Record, to_plain
from tests.jobs import hostile_nets
from tests.jobs.fake_worker import LONG_S, finish, wait_gone

Picture = tuple[str, Any]
NETS = Path(hostile_nets.__file__)


@pytest.mark.parametrize("kind", get_args(Request))
def test_a_row_names_the_function_of_its_request(kind: type[Record]) -> None:
    function = getattr(import_module(ROWS[kind].module), ROWS[kind].function)
    assert next(iter(get_type_hints(function).values())) is kind
    assert bool(ROWS[kind].pages) == bool(ROWS[kind].doing)


def test_a_first_graph_does_not_wait_for_what_only_runs_need() -> None:
    model = ModelRef(target="sample_models/mlp.py")
    assert needs_of(Describe(model=model)) == WARM[:1]
    assert needs_of(Measure(spec=RunSpec(model=model))) == WARM[:3]
    assert needs_of(DrawAutograd(spec=RunSpec(model=model), block="a")) == ALL_WARM


def test_compiled_code_lies_where_no_other_user_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(settings()["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_relative_to(tmp_path) and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Its server imports what jobs need and nothing ahead."""
    worker = Worker(tmp_path_factory.mktemp("store") / "runs.sqlite", program=dataclasses.replace(ENGINE, warm=()))
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
def fresh(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Picture]:
    """What the run gives in a worker that has seen nothing else; twice, for it has to be a fixed thing."""
    path = tmp_path_factory.mktemp("bits") / "bits"
    pictures = [bits_and_bytes(worker, path) for _ in range(2)]
    assert pictures[0] == pictures[1] and pictures[0][0].count("gradient") >= 3
    return path, pictures[0]


NAMES = list(hostile_nets.HOSTILE)
FIRST_KILLER = NAMES.index("its own group killed")
IN_A_ROW = NAMES[:FIRST_KILLER]
"""Models that patch and leak come one after the other before a run; those that kill or write to others come alone."""


@pytest.mark.slow
@pytest.mark.parametrize("names", [IN_A_ROW, *([name] for name in NAMES[FIRST_KILLER:])], ids=lambda names: names[0])
def test_the_run_after_it_is_that_of_a_fresh_worker(
    worker: Worker, fresh: tuple[Path, Picture], names: list[str]
) -> None:
    for name in names:
        failure = hostile(worker, name).failure
        if name == "its own group killed":
            assert failure is not None and (failure.kind, "SIGKILL" in failure.sentence) == ("crash", True), failure
    path, expected = fresh
    bits, record = bits_and_bytes(worker, path)
    assert bits == expected[0]
    assert not {key: (value, expected[1][key]) for key, value in record.items() if value != expected[1][key]}


@pytest.mark.slow
@pytest.mark.parametrize("how", hostile_nets.ODD)
def test_an_odd_model_is_compared_or_blamed_and_never_ends_in_an_error_of_ours(worker: Worker, how: str) -> None:
    model = ModelRef(target=f"{NETS}:odd", arguments={"how": how})
    runs = [RunSpec(model=model, n_repeats=0, policy=Policy.recompute(units)) for units in ([], ["1"])]
    job = finish(worker.submit(Compare(baseline=runs[0], candidate=runs[1], full=how == "cannot evaluate"), keep=False))
    failure = job.failure or getattr(job.result, "failure", None)
    assert (failure.kind if failure else None) == hostile_nets.ODD[how], failure


def held(pid: int, most_files: float = math.inf) -> tuple[int, int]:
    """Open descriptors, and memory of its own in KiB, once at most `most_files` are open.

    The pipes of the last run are closed a moment after its answer; a leak stays open for the whole wait.
    """
    ends = time.monotonic() + LONG_S
    while n_open(pid) > most_files and time.monotonic() < ends:
        time.sleep(0.05)
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    own = sum(int(line.split()[1]) for line in lines if line.startswith(("Private", "Swap:")))
    return n_open(pid), own


def children_of(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def n_open(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.slow
def test_many_runs_leave_app_and_fork_server_as_large_as_a_few(worker: Worker) -> None:
    spec = RunSpec(model=ModelRef(target="sample_models/mlp.py", arguments={"n_layers": 1, "batch": 2}), n_repeats=1)
    readings: dict[int, dict[str, tuple[int, int]]] = {}
    for n in range(1, 12):
        request = Measure(spec=spec, without_data=True) if n % 5 == 0 else Describe(model=spec.model)
        assert finish(worker.submit(request)).failure is None
        if n in (5, 11):
            assert worker._forks is not None and worker._forks.pid is not None
            gc.collect()
            wait_gone(*children_of(worker._forks.pid))  # the server shares its memory with them
            processes = {"app": os.getpid(), "server": worker._forks.pid}
            first = readings.get(5, {})
            readings[n] = {name: held(pid, *first.get(name, ())[:1]) for name, pid in processes.items()}
    for process, (n_files, own_kib) in readings[11].items():
        assert n_files <= readings[5][process][0], readings
        assert own_kib < readings[5][process][1] + 2 * 1024, readings


@pytest.mark.slow
def test_a_daemon_of_a_model_is_gone_with_its_run(worker: Worker, tmp_path: Path) -> None:
    model = ModelRef(target=f"{NETS}:daemon", arguments={"path": str(tmp_path / "pid")})
    assert finish(worker.submit(Describe(model=model))).failure is None
    wait_gone(int((tmp_path / "pid").read_text()))
