"""The worker as the app sees it: progress, cancel, crash, time-out, no orphan; and its process with pipe and stderr."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from explorer.errors import BadInput
from explorer.jobs import run_file
from explorer.jobs import worker as worker_module
from explorer.jobs.child import Child, worker_command
from explorer.jobs.client import Worker
from explorer.jobs.protocol import CancelJob, Event, Failed, Measure
from explorer.jobs.store import Store
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec
from tests.jobs.samples import FAKE, LONG_S, begin, describe, finish, measure, wait_gone


def test_a_result_arrives_and_one_process_serves_all(worker: Worker) -> None:
    first = finish(describe(worker, "a"))
    pid = worker._child.pid if worker._child else None
    second = finish(describe(worker, "b"))
    assert isinstance(first.result, ModelGraph) and first.result.model.target == "a"
    assert second.result is not None and second.failure is None
    assert worker._child is not None and worker._child.pid == pid
    assert worker.job(first.id) is first and first.id != second.id
    assert 0 < first.elapsed_s == first.elapsed_s


def test_a_run_is_kept_with_the_graph_of_a_model_that_was_described(worker: Worker, store_path: Path) -> None:
    unknown = finish(measure(worker, "a"))
    described = finish(describe(worker, "a"))
    known, other = finish(measure(worker, "a")), finish(measure(worker, "b"))
    assert [job.result.graph for job in (unknown, known, other)] == [None, described.result, None]
    assert known.run_id is not None and run_file.graph_of(Store(store_path).load(known.run_id)) == described.result


def test_a_run_beyond_its_limits_is_refused_where_it_is_asked_for(worker: Worker) -> None:
    for name, value in {"n_repeats": 10**6, "n_threads": 0, "seed": 2**60, "time_limit_s": float("nan")}.items():
        with pytest.raises(BadInput, match=name):
            measure(worker, "a", **{name: value})
    assert worker._child is None and not worker.open_jobs()


def test_progress_and_parts_of_the_result_arrive(worker: Worker) -> None:
    job = measure(worker, "steps:20")
    seen, parts = set(), []
    while not job.wait(0.005):
        seen.add(job.progress.done)
        parts.append(job.part)
    assert len(seen) > 5 and job.progress.total == 20 and job.began
    assert isinstance(parts[-1], Measurement) and parts[-1] == job.result


def test_a_result_answers_a_job_that_waits_for_the_same_run(worker: Worker, store_path: Path) -> None:
    spec = RunSpec(model=ModelRef(target="steps:10"))
    first = begin(worker.submit(Measure(spec=spec, until_it_fits=True)), "stepping")
    same, other = measure(worker, "steps:10"), measure(worker, "steps:10", seed=1)
    assert finish(first).result == finish(same).result != finish(other).result
    assert not same.began and other.began and len(Store(store_path).list()) == 2


def test_a_model_that_prints_or_reads_stdin_disturbs_nothing(worker: Worker) -> None:
    assert finish(describe(worker, "prints")).result is not None


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("raises", "model raised", "forward raised"),
        ("bug:key", "internal", "TypeError: cannot use a str"),
        ("leaves", "model raised", "sys.exit(3)"),
    ],
)
def test_an_exception_is_a_result_and_the_worker_lives(worker: Worker, target: str, kind: str, words: str) -> None:
    job = finish(describe(worker, target))
    assert job.failure is not None and job.failure.kind == kind
    assert words in job.failure.sentence and "fake_worker.py" in job.failure.traceback
    pid = worker._child.pid if worker._child else None
    assert finish(describe(worker, "next")).result is not None
    assert worker._child is not None and worker._child.pid == pid


@pytest.mark.parametrize(
    ("target", "words", "trace"),
    [
        ("segfault", "SIGSEGV", "fake_worker.py"),
        ("killed", "SIGKILL", ""),
        ("exits", "exit code 3", "going"),
    ],
)
def test_a_crash_is_a_result_and_the_next_run_works(worker: Worker, target: str, words: str, trace: str) -> None:
    job, waiting = describe(worker, target), describe(worker, "waiting")
    finish(job)
    assert job.failure is not None and job.failure.kind == "crash"
    assert words in job.failure.sentence and target in job.failure.sentence and trace in job.failure.traceback
    assert finish(waiting).result is not None, "a job that had not begun is handed to the next worker"


def test_a_request_that_cannot_be_written_is_refused_where_it_is_made(worker: Worker) -> None:
    with pytest.raises(BadInput, match=r"'a\\udcff' cannot be written"):
        describe(worker, "a\udcff")
    assert not worker.open_jobs() and finish(describe(worker, "next")).result is not None


def test_a_worker_that_cannot_start_is_tried_twice_and_says_why(store_path: Path) -> None:
    worker = Worker(store_path, command=(sys.executable, "-c", "raise SystemExit('no torch here')"))
    job = finish(describe(worker, "a"))
    assert job.failure is not None and job.failure.kind == "crash" and "no torch here" in job.failure.traceback


def test_a_job_that_does_not_listen_is_killed_after_the_grace(worker: Worker) -> None:
    job = begin(describe(worker, "stuck"), "stuck")
    waiting = describe(worker, "waiting")
    job.cancel()
    finish(job)
    assert job.failure is not None and job.failure.kind == "cancelled"
    assert finish(waiting).result is not None


@pytest.mark.parametrize("target", ["steps:3000", "stuck"])
def test_the_time_limit_ends_a_run(worker: Worker, target: str) -> None:
    job = finish(measure(worker, target, time_limit_s=0.2))
    assert job.failure is not None and job.failure.kind == "time-out" and "0.2 s" in job.failure.sentence


def test_a_finished_run_is_in_the_store_before_the_job_is_finished(worker: Worker, store_path: Path) -> None:
    job = finish(measure(worker, "a"))
    assert job.run_id is not None and Store(store_path).load(job.run_id) == job.result
    assert isinstance(job.result, Measurement) and job.result.loss == 1.5
    unkept = finish(worker.submit(job.request, keep=False))
    assert unkept.result == job.result and unkept.run_id is None
    assert [run.run_id for run in Store(store_path).list()] == [job.run_id]


def test_two_servers_with_four_sessions_each_share_one_store(worker: Worker, store_path: Path) -> None:
    """Besides a third process that reads and renames, as the command line does."""
    other = Worker(store_path, command=(sys.executable, str(FAKE), str(store_path)))
    finish(measure(worker, "first"))

    def session(k: int) -> list[str]:
        server = (worker, other)[k % 2]
        jobs = [finish(measure(server, f"{k}-{i}")) for i in range(3)]
        assert all(isinstance(job.result, Measurement) and not job.warning for job in jobs)
        assert [job.result.spec.model.target for job in jobs if job.result] == [f"{k}-{i}" for i in range(3)]  # type: ignore[attr-defined]
        return [job.run_id or "" for job in jobs]

    source = (
        "import sys; from explorer.jobs.store import Store; store = Store(sys.argv[1])\n"
        "for i in range(40): store.rename(store.list()[-1].run_id, f'name {i}')\n"
    )
    beside = subprocess.Popen([sys.executable, "-c", source, str(store_path)], cwd=FAKE.parents[2])
    with ThreadPoolExecutor(8) as sessions:
        run_ids = [run_id for saved in sessions.map(session, range(8)) for run_id in saved]
    other.close()
    assert beside.wait(60) == 0
    stored = Store(store_path).list()
    assert len(set(run_ids)) == 24 and set(run_ids) < {run.run_id for run in stored} and len(stored) == 25


def test_a_run_that_cannot_be_saved_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = tmp_path / "file" / "runs.sqlite"
    worker = Worker(store, command=(sys.executable, str(FAKE), str(store)))
    job = finish(measure(worker, "a"))
    worker.close()
    assert job.result is not None and job.run_id is None and "could not be saved" in job.warning


def test_close_ends_open_jobs_and_the_process(store_path: Path) -> None:
    worker = Worker(store_path, command=(sys.executable, str(FAKE), str(store_path)))
    job = begin(describe(worker, "stuck"), "stuck")
    assert worker._child is not None
    pid = worker._child.pid
    worker.close()
    finish(job)
    assert job.failure is not None and job.failure.kind == "cancelled"
    wait_gone(pid)
    late = finish(describe(worker, "late"))
    assert late.failure is not None and late.failure.kind == "cancelled"


ECHO = """
import sys
from explorer.jobs.protocol import CancelJob, Command, Failed, read_frame, write_frame
from explorer.record.failure import Failure
while (command := read_frame(sys.stdin.buffer, Command)) is not None:
    write_frame(sys.stdout.buffer, Failed(job=command.job, failure=Failure(kind="cancelled", sentence="heard")))
"""


class Heard:
    """Events and ends that the child's thread reports."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.ends: queue.Queue[tuple[int, str]] = queue.Queue()

    def child(self, program: str) -> Child:
        return Child(
            (sys.executable, "-c", program),
            lambda _, event: self.events.put(event),
            lambda _, code, words: self.ends.put((code, words)),
        )


def test_it_hears_answers_and_ends_when_its_stdin_does() -> None:
    heard = Heard()
    child = heard.child(ECHO)
    for job in ("1", "2"):
        child.send(CancelJob(job=job))
        event = heard.events.get(timeout=LONG_S)
        assert isinstance(event, Failed) and event.job == job
    child.close()
    assert heard.ends.get(timeout=LONG_S) == (0, "")
    child.close()  # once more does no harm
    assert heard.ends.empty()


def test_its_last_words_are_kept() -> None:
    heard = Heard()
    heard.child("import sys; sys.stderr.write('x' * 20_000 + 'the end'); sys.exit(4)")
    code, words = heard.ends.get(timeout=LONG_S)
    assert code == 4 and words.endswith("xthe end") and len(words) == 16_000


def test_what_is_no_event_ends_it() -> None:
    heard = Heard()
    heard.child(
        "import sys, time; sys.stdout.buffer.write(b'\\1' + bytes(7) + b'\\xff'); sys.stdout.flush(); time.sleep(600)"
    )
    code, words = heard.ends.get(timeout=LONG_S)
    assert code == -9 and words


def test_a_killed_one_takes_along_what_it_started() -> None:
    heard = Heard()
    child = heard.child(
        "import subprocess, sys, time; other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
        "; sys.stderr.write(f'[{other.pid}]'); sys.stderr.flush()"
        "; sys.stdout.buffer.write(b'\\1' + bytes(7) + b'\\xff'); sys.stdout.flush(); time.sleep(600)"
    )
    _, words = heard.ends.get(timeout=LONG_S)
    (started,) = re.findall(r"\[(\d+)\]", words)  # before or behind what its end is put down to
    wait_gone(child.pid, int(started))


def test_the_real_one_is_a_module_of_this_interpreter() -> None:
    command = worker_command(Path("/there/runs.sqlite"))
    assert command == (sys.executable, "-m", "explorer.jobs.worker", "--store", "/there/runs.sqlite")


def test_a_worker_for_graphs_imports_nothing_else_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ahead: list[tuple[str, ...]] = []
    monkeypatch.setattr(sys, "argv", [*worker_command(tmp_path / "runs.sqlite", only_graphs=True)[2:]])
    monkeypatch.setattr(worker_module.Forks, "launch", lambda warm: ahead.append(warm))
    monkeypatch.setattr(worker_module.Service, "run", lambda service: None)
    monkeypatch.setattr(worker_module, "keep_compiled_code", lambda: None)
    monkeypatch.setattr(worker_module.faulthandler, "enable", lambda: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    worker_module.main()
    assert ahead == [worker_module.WARM[:1]]
