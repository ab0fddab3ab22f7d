"""Jobs as the app sees them: progress, cancel, crash, time-out, store, no orphan; and the process of one job."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import BadInput, UnreadableFile
from explorer.jobs import run_file
from explorer.jobs.client import Job, Worker
from explorer.jobs.job_process import JobProcess
from explorer.jobs.protocol import (
    DESCRIBE_LIMIT_S,
    STEPS_OF_A_FIT,
    Compare,
    Describe,
    Event,
    Failed,
    FindFit,
    FindPlans,
    Finished,
    Frames,
    Measure,
    Reported,
    Submit,
    description_of,
    models_of,
    time_limit_s,
    write_frame,
)
from explorer.jobs.store import Store
from explorer.record import Failure, Measurement, ModelGraph, ModelRef, RunSpec
from explorer.record.plan import Progress
from tests.jobs.fake_worker import FAKE, LONG_S, begin, describe, finish, measure, wait_gone

ROOT = Path(__file__).parents[2]


def server_of(worker: Worker) -> int | None:
    return worker._forks.pid if worker._forks else None


def test_a_result_arrives_and_one_server_serves_all(worker: Worker) -> None:
    first = finish(describe(worker, "a"))
    server = server_of(worker)
    second = finish(describe(worker, "b"))
    assert isinstance(first.result, ModelGraph) and first.result.model.target == "a"
    assert second.result is not None and second.failure is None and server_of(worker) == server
    assert worker.job(first.id) is first and first.id != second.id
    assert 0 < first.elapsed_s == first.elapsed_s


def test_a_run_is_in_the_store_with_its_graph_before_the_job_is_finished(alone: Worker) -> None:
    unknown, described = finish(measure(alone, "a")), finish(describe(alone, "a"))
    known, other = finish(measure(alone, "a")), finish(measure(alone, "b"))
    unkept = finish(alone.submit(known.request, keep=False))
    assert [job.result.graph for job in (unknown, known, other)] == [None, described.result, None]  # type: ignore[union-attr]
    store = Store(alone.store_path)
    assert known.run_id is not None and store.load(known.run_id) == known.result == unkept.result
    assert run_file.graph_of(store.load(known.run_id)) == described.result
    stored = {run.run_id for run in store.list()}
    assert unkept.run_id is None and stored == {unknown.run_id, known.run_id, other.run_id}


def test_what_cannot_be_asked_is_refused_where_it_is_asked(alone: Worker) -> None:
    for name, value in {"n_repeats": 10**6, "n_threads": 0, "seed": 2**60, "time_limit_s": float("nan")}.items():
        with pytest.raises(BadInput, match=name):
            measure(alone, "a", **{name: value})
    with pytest.raises(BadInput, match=r"'a\\udcff' cannot be written"):
        describe(alone, "a\udcff")
    assert alone._forks is None and not alone.open_jobs()


def test_progress_and_parts_of_the_result_arrive(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    hear, heard, news = worker._heard, [], []

    def listen(job: Job, progress: Progress) -> None:
        counts = progress.total > 0 == job.progress.total
        is_news, before = not job._began or counts or bool(progress.part), job.n_news
        hear(job, progress)
        heard.append((job.progress.done, job.part))
        news.append((job.n_news - before, is_news))

    monkeypatch.setattr(worker, "_heard", listen)
    job = finish(measure(worker, "steps:20"))
    assert [done for done, _ in heard[-20:]] == list(range(20)) and job.progress.total == 20 and job._began
    assert isinstance(job.part, Measurement) and [part for _, part in heard[-20:]] == [None] + [job.result] * 19
    assert job.n_news == 1 + sum(is_news for _, is_news in news), "and of the end"
    last = finish(measure(worker, "parts")).part
    assert isinstance(last, Measurement) and last.graph is not None, "a page that looks late sees the last part alone"
    assert all(n == is_news for n, is_news in news), "a page hears of the begin, of the first count and of parts"


def test_a_result_answers_a_job_that_waits_for_the_same_run(alone: Worker, tmp_path: Path) -> None:
    target = f"waits:{tmp_path / 'go'}"
    first = begin(alone.submit(Measure(spec=RunSpec(model=ModelRef(target=target)), until_it_fits=True)), "waiting")
    same, other = measure(alone, target), measure(alone, target, seed=1)
    assert alone.open_jobs() == (first, same, other)
    (tmp_path / "go").touch()
    assert finish(first).result == finish(same).result != finish(other).result
    assert not same._began and other._began and len(Store(alone.store_path).list()) == 2


@pytest.mark.parametrize(("target", "kind", "words", "trace"), [
    ("raises", "model raised", "forward raised", "fake_worker.py"),
    ("bug:key", "internal", "TypeError: cannot use a str", "fake_worker.py"),
    ("leaves", "model raised", "sys.exit(3)", "fake_worker.py"),
    ("segfault", "crash", "SIGSEGV", "fake_worker.py"),
    ("killed", "crash", "SIGKILL", ""),
    ("exits", "crash", "exit code 3", "going"),
    ("prints", "", "", ""),
])  # fmt: skip
def test_an_error_or_a_crash_is_a_result_and_the_next_run_works(
    worker: Worker, target: str, kind: str, words: str, trace: str
) -> None:
    job, waiting = describe(worker, target), describe(worker, "waiting")
    failure = finish(job).failure
    if kind:
        assert failure is not None and failure.kind == kind
        assert words in failure.sentence and trace in failure.traceback
    else:
        assert failure is None
    server = server_of(worker)
    assert finish(waiting).result is not None and server_of(worker) == server


def test_a_server_that_cannot_start_says_why(alone: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho no torch here >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "python"))
        failure = finish(describe(alone, "a")).failure
    assert failure is not None and failure.kind == "crash" and "no torch here" in failure.traceback
    assert finish(describe(alone, "b")).result is not None, "the next job has a new server"


def test_a_server_that_is_killed_ends_its_job_alone(alone: Worker) -> None:
    job, waiting = begin(describe(alone, "stuck"), "stuck"), describe(alone, "waiting")
    server = server_of(alone)
    assert server is not None
    os.kill(server, signal.SIGKILL)
    failure = finish(job).failure
    assert failure is not None and failure.kind == "crash" and "fork server" in failure.sentence
    assert finish(waiting).result is not None and server_of(alone) != server


def test_a_cancel_ends_its_own_job_alone(worker: Worker) -> None:
    working, waiting = begin(describe(worker, "steps:3000"), "stepping"), describe(worker, "waiting")
    waiting.cancel()
    assert waiting.finished and not waiting._began and not working.finished
    server = server_of(worker)
    working.cancel()
    following = finish(describe(worker, "next"))
    working.cancel()
    assert following.result is not None and finish(describe(worker, "another")).result is not None
    for job in (working, waiting):
        assert job.failure is not None and job.failure.kind == "cancelled"
    assert server_of(worker) == server


def test_a_job_that_does_not_listen_is_killed_with_what_it_started(worker: Worker, tmp_path: Path) -> None:
    job = begin(describe(worker, f"orphan:{tmp_path / 'pids'}"), "orphan")
    waiting = describe(worker, "waiting")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    job.cancel()
    failure = finish(job).failure
    assert failure is not None and failure.kind == "cancelled"
    wait_gone(*pids)
    assert finish(waiting).result is not None


def test_a_cancelled_search_has_no_grace(tmp_path: Path) -> None:
    worker = Worker(tmp_path, program=FAKE, grace_s=1e6)
    try:
        run, graph = finish(measure(worker, "a")).result, finish(describe(worker, "a")).result
        assert isinstance(run, Measurement) and isinstance(graph, ModelGraph)
        search = begin(worker.submit(FindPlans(run=run, graph=graph)), "solving")
        search.cancel()
        failure = finish(search).failure
        assert failure is not None and failure.kind == "cancelled"
    finally:
        worker.close()


@pytest.mark.parametrize("target", ["steps:3000", "stuck"])
def test_the_time_limit_ends_a_run(worker: Worker, target: str) -> None:
    job = finish(measure(worker, target, time_limit_s=0.2))
    assert job.failure is not None and job.failure.kind == "time-out" and "0.2 s" in job.failure.sentence


def test_two_servers_with_four_sessions_each_share_one_store(alone: Worker) -> None:
    """Besides a third process that reads and renames, as the command line does."""
    other = Worker(alone.store_path, program=FAKE)
    finish(measure(alone, "first"))

    def session(k: int) -> list[str]:
        server = (alone, other)[k % 2]
        jobs = [finish(measure(server, f"{k}-{i}")) for i in range(3)]
        assert all(isinstance(job.result, Measurement) and not job.warning for job in jobs)
        assert [job.result.spec.model.target for job in jobs if job.result] == [f"{k}-{i}" for i in range(3)]  # type: ignore[attr-defined]
        return [job.run_id or "" for job in jobs]

    source = (
        "import sys; from explorer.jobs.store import Store; store = Store(sys.argv[1])\n"
        "for i in range(40): store.rename(store.list()[-1].run_id, f'name {i}')\n"
    )
    beside = subprocess.Popen([sys.executable, "-c", source, str(alone.store_path)], cwd=ROOT)
    with ThreadPoolExecutor(8) as sessions:
        run_ids = [run_id for saved in sessions.map(session, range(8)) for run_id in saved]
    other.close()
    assert beside.wait(60) == 0
    stored = Store(alone.store_path).list()
    assert len(set(run_ids)) == 24 and set(run_ids) < {run.run_id for run in stored} and len(stored) == 25


def test_equal_requests_of_two_servers_are_one_run(alone: Worker, tmp_path: Path) -> None:
    """The first server is a process that is killed; a cancelled window leaves the others their turn."""
    script = (
        "import sys; from explorer.jobs.client import Worker; from tests.jobs.fake_worker import FAKE;"
        "from tests.jobs.fake_worker import begin, measure; worker = Worker(sys.argv[1], program=FAKE);"
        "begin(measure(worker, sys.argv[2]), 'waiting'); print('runs', flush=True); sys.stdin.read()"
    )
    target, equal = f"waits:{tmp_path / 'go'}", "waiting for an equal run in another window"
    command = [sys.executable, "-c", script, str(alone.store_path), target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as first:
        assert first.stdout is not None and first.stdout.readline() == b"runs\n"
        cancelled = begin(measure(alone, target), equal)
        cancelled.cancel()
        assert finish(cancelled).failure is not None and not cancelled._began
        second = begin(measure(alone, target), equal)
        first.kill()
    begin(second, "waiting")
    third = Worker(alone.store_path, program=FAKE)
    taken, other = begin(measure(third, target), equal), measure(third, "other")
    (tmp_path / "go").touch()
    assert finish(taken).run_id == finish(second).run_id and taken.result == second.result
    assert not taken._began and finish(other).result is not None
    assert finish(measure(third, target)).run_id != second.run_id, "who did not wait measures again"
    third.close()
    assert len(Store(alone.store_path).list()) == 3


def test_a_run_that_cannot_be_saved_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    worker = Worker(tmp_path / "file" / "runs.sqlite", program=FAKE)
    job = finish(measure(worker, "a"))
    worker.close()
    assert job.result is not None and job.run_id is None and "could not be saved" in job.warning


def test_close_ends_open_jobs_and_all_processes(alone: Worker, tmp_path: Path) -> None:
    jobs = [begin(describe(alone, f"orphan:{tmp_path / 'pids'}"), "orphan"), describe(alone, "waiting")]
    pids = [server_of(alone) or 0, *map(int, (tmp_path / "pids").read_text().split())]
    folder = Path(alone._folder)
    assert folder.exists()
    alone.close()
    wait_gone(*pids)
    for job in (*jobs, describe(alone, "late")):
        assert finish(job).failure is not None and job.failure.kind == "cancelled"  # type: ignore[union-attr]
    assert not folder.exists()
    alone.close()  # once more does no harm


def test_leftovers_are_removed_and_no_folder_in_the_way_stops_a_run(
    alone: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others, or nobody's worker, put into the temporary directory under like names."""
    killed = subprocess.Popen(["true"])
    killed.wait()
    odd = ("1abc-x", "99999999999999999999-x", f"{os.getpid()}-lives", "-1-x", "\u0662-x", "0-\udcff", "7", "")
    for name in (*odd, f"{killed.pid}-dead"):
        (tmp_path / f"checkpoint-explorer-{name}").mkdir()
    (tmp_path / f"checkpoint-explorer-{killed.pid}-link").symlink_to(tmp_path / "checkpoint-explorer-7")
    (tmp_path / f"checkpoint-explorer-{killed.pid}-file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert finish(describe(alone, "a")).result is not None
    assert not (tmp_path / f"checkpoint-explorer-{killed.pid}-dead").exists()
    assert all((tmp_path / f"checkpoint-explorer-{name}").exists() for name in odd)


def test_a_killed_app_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import sys, time; from explorer.jobs.client import Worker; from explorer.jobs.protocol import Describe;"
        "from explorer.record.graph import ModelRef; from tests.jobs.fake_worker import FAKE;"
        "store, pids = sys.argv[1:]; worker = Worker(store, program=FAKE);"
        "worker.submit(Describe(model=ModelRef(target='orphan:' + pids))); time.sleep(60)"
    )
    pids = tmp_path / "pids"
    app = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "runs.sqlite"), str(pids)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + LONG_S
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline and app.poll() is None
        time.sleep(0.02)
    app.send_signal(signal.SIGKILL)
    app.wait()
    wait_gone(*[int(pid) for pid in pids.read_text().split()])


SPEC = RunSpec(model=ModelRef(target="a.py"), time_limit_s=30.0)


def test_limits_and_names_of_requests() -> None:
    longer = RunSpec(model=ModelRef(target="b.py"), time_limit_s=90.0)
    assert time_limit_s(Measure(spec=SPEC)) == 30.0
    assert time_limit_s(Compare(baseline=SPEC, candidate=longer)) == 90.0
    assert time_limit_s(FindFit(spec=SPEC)) == STEPS_OF_A_FIT * 30.0
    assert time_limit_s(Describe(model=SPEC.model)) == DESCRIBE_LIMIT_S
    assert models_of(Describe(model=SPEC.model)) == models_of(Measure(spec=SPEC)) == [SPEC.model]
    assert description_of(Measure(spec=SPEC)) == "measure a.py"


REPORT = Reported(progress=Progress(what="stepping", done=1, total=2))
EVENTS: list[Event] = [
    REPORT, Finished(result=b"bytes", run_id="1"), Failed(failure=Failure(kind="crash", sentence="It crashed."))
]  # fmt: skip


def bytes_of(*events: Event) -> bytes:
    stream = io.BytesIO()
    for event in events:
        write_frame(stream, event)
    return stream.getvalue()


@given(st.lists(st.integers(1, 400), max_size=5))
def test_pieces_of_any_size_make_the_same_events(cuts: list[int]) -> None:
    data, frames = bytes_of(*EVENTS), Frames()
    read: list[Event] = []
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for first, last in zip(borders, borders[1:]):
        frames.add(data[first:last])
        while (event := frames.next()) is not None:
            read.append(event)
    assert read == EVENTS


def test_a_length_that_nobody_means_is_refused_before_it_is_waited_for() -> None:
    frames = Frames()
    frames.add(b"\xff" * 8)
    with pytest.raises(UnreadableFile, match="was announced"):
        frames.next()


@dataclass
class Ended:
    """A process that has ended already."""

    answers: bytes
    code: int | None = 0
    out_of_memory: bool | None = None
    last_words: str = "its last words"

    def chunks(self) -> Iterator[bytes]:
        yield from (self.answers[i : i + 7] for i in range(0, len(self.answers), 7))

    def close(self) -> None:
        """Nothing is left."""


def answer_of(child: Any, heard: list[Event]) -> Event:
    job = JobProcess(Submit(request=Describe(model=SPEC.model)), lambda *_: child, "/tmp")
    answer = job.answer(heard.append)
    job.close()
    return answer


def test_reports_are_passed_on_and_the_answer_is_returned() -> None:
    heard: list[Event] = []
    assert answer_of(Ended(bytes_of(REPORT, *EVENTS)), heard) == EVENTS[1] and heard == [REPORT, REPORT]


@pytest.mark.parametrize(("code", "out_of_memory", "kind", "words"), [
    (-11, False, "crash", "SIGSEGV"),
    (-250, False, "crash", "signal 250"),
    (3, None, "crash", "exit code 3"),
    (-9, True, "out of memory", ""),
    (-9, False, "crash", "SIGKILL"),
    (None, None, "crash", "fork server"),
])  # fmt: skip
def test_an_end_without_an_answer_is_one(code: int | None, out_of_memory: bool | None, kind: str, words: str) -> None:
    heard: list[Event] = []
    answer = answer_of(Ended(bytes_of(REPORT), code, out_of_memory), heard)
    assert heard == [REPORT] and isinstance(answer, Failed)
    assert answer.failure.kind == kind
    assert words in answer.failure.sentence and "describe a.py" in answer.failure.sentence
    assert ("memory" in answer.failure.hint) == (code == -9)
    assert answer.failure.traceback == "its last words"


def test_a_job_without_a_folder_for_its_files_fails_and_the_next_one_runs(alone: Worker) -> None:
    finish(describe(alone, "a"))
    folder = Path(alone._folder)
    folder.rename(folder.with_name(f"{folder.name}-away"))
    failure = finish(describe(alone, "b")).failure
    assert failure is not None and failure.kind == "internal" and "FileNotFoundError" in failure.sentence
    folder.with_name(f"{folder.name}-away").rename(folder)
    assert finish(describe(alone, "c")).result is not None


def test_what_is_no_message_is_a_crash_that_says_who_wrote() -> None:
    answer = answer_of(Ended(b"\xff" * 64), [])
    assert isinstance(answer, Failed) and "The model wrote into the pipe" in answer.failure.sentence
