"""Forked processes: a process leads a group that ends with it, its answer, its end in words, and a lost server."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorer.child_process import forks
from explorer.child_process.forks import LENGTH, Answering, Forked, Forks, at_hand


@pytest.fixture(scope="module")
def server() -> Iterator[Forks]:
    """A server that has imported nothing."""
    server = Forks.launch()
    yield server
    server.close()


def fails() -> None:
    raise ValueError("in the child")


def says_who_it_is(voice: int) -> None:
    os.write(voice, f"{os.getpid()} {os.getpgrp()} {os.getppid()}".encode())


def leaves_a_daemon(voice: int) -> None:
    """The daemon holds the pipe open, and leaves group and session."""
    if os.fork() == 0:
        os.setsid()
        signal.pause()


def starts_another(voice: int) -> None:
    at_hand().start(waits, files=[voice])


def waits(voice: int) -> None:
    signal.pause()


class Poison:
    """Unpickled, it marks the process."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("import os; os.environ['POISONED'] = 'yes'",)


def marks_and_says_so(poison: object, voice: int) -> None:
    os.write(voice, os.environ.get("POISONED", "no").encode())


def says_whether_marked(voice: int) -> None:
    marks_and_says_so(None, voice)


def imported(module: str, voice: int) -> None:
    """Whether the server had imported `module` before this process began."""
    os.write(voice, str(module in sys.modules).encode())


def whether_it_collects(voice: int) -> None:
    os.write(voice, str(gc.isenabled()).encode())


def answer_of(server: Forks, function: object, *arguments: object, needs: tuple[str, ...] = ()) -> bytes:
    ear, voice = os.pipe()
    child = server.start(function, *arguments, files=[voice], needs=needs)
    os.close(voice)
    said = all_said(ear)
    child.close()
    return said


def all_said(ear: int) -> bytes:
    """All bytes until the other end of the pipe is closed everywhere."""
    with os.fdopen(ear, "rb") as file:
        return file.read()


def test_how_a_child_ended_is_known(server: Forks) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    left, failed = server.start(os.getpid), server.start(fails, errors=nothing)
    killed = server.start(signal.pause)
    left.wait()
    failed.wait()
    assert (left.code, failed.code) == (0, 1)
    killed.kill()
    killed.wait()
    assert killed.code == -signal.SIGKILL
    for child in (left, failed, killed):
        child.close()
    os.close(nothing)


def test_a_child_collects_garbage_though_the_server_does_not(server: Forks) -> None:
    assert answer_of(server, whether_it_collects) == b"True"


def test_a_child_leads_a_group_of_its_own(server: Forks) -> None:
    ear, voice = os.pipe()
    child = server.start(says_who_it_is, files=[voice])
    os.close(voice)
    own, group, parent = map(int, all_said(ear).split())
    child.close()
    assert own == group == child.pid and parent != os.getpid() and child.code == 0


@pytest.mark.parametrize("starts", [leaves_a_daemon, starts_another])
def test_what_a_child_started_ends_with_it(server: Forks, starts: object) -> None:
    ear, voice = os.pipe()
    child = server.start(starts, files=[voice])
    os.close(voice)
    child.wait()
    assert all_said(ear) == b""  # ends only once the other process has let go of the pipe
    child.close()


def test_with_the_server_ends_every_child() -> None:
    server = Forks.launch()
    ear, voice = os.pipe()
    child = server.start(waits, files=[voice])
    os.close(voice)
    server.close()
    assert all_said(ear) == b"" and child.ended and not server.alive
    child.close()


def test_what_is_pickled_is_unpickled_in_the_child_alone(server: Forks) -> None:
    assert answer_of(server, marks_and_says_so, Poison()) == b"yes"
    assert answer_of(server, says_whether_marked) == b"no"


def sends(*frames: bytes) -> None:
    """A model that found the way to the server."""
    line = at_hand()._server
    for frame in frames:
        socket.send_fds(line, [LENGTH.pack(len(frame)) + frame], [2, 2])


POISON = pickle.dumps(Poison())
FRAMES = {
    "a pickle": POISON,
    "names of one word": b"os\n" + POISON,
    "no names": b"\n" + POISON,
    "names that are not text": b"\xff \xfe\n" + POISON,
    "nothing": b"",
}


def test_a_request_that_is_none_changes_nothing(server: Forks) -> None:
    for name, frame in FRAMES.items():
        child = server.start(sends, frame)
        child.wait()
        child.close()
        assert answer_of(server, says_whether_marked) == b"no" and server.alive, name


def test_a_server_imports_what_is_named_in_its_list_and_nothing_else(server: Forks) -> None:
    needs = ("explorer.jobs.store", "explorer.__main__", "wsgiref.types", "explorer.jobs.no_such_module")
    asked = [answer_of(server, imported, name, needs=needs) for name in needs]
    assert asked == [b"True", b"False", b"False", b"False"] and server.alive


def test_a_server_that_a_process_has_lost_is_not_asked_again() -> None:
    """Its line may hang up a moment later than the process ends."""
    own, its = socket.socketpair()
    ear, voice = os.pipe()
    with own, its:
        server = Forks(own)
        forked = Forked(ear, server)
        assert server.alive and not forked.ended
        os.close(voice)
        assert forked.ended and forked.code is None and not server.alive
    forked.close()


def answers_and_leaves(count: int, answers: int) -> None:
    for number in range(count):
        os.write(answers, b"%d\n" % number)
    print(20_000 * "-", "no more", sep="\n", file=sys.stderr, flush=True)
    os._exit(7)


def answers_and_dies(answers: int) -> None:
    os.write(answers, b"one\nhalf of the seco")
    os.kill(os.getpid(), signal.SIGABRT)


def answers_and_stays(answers: int) -> None:
    os.write(answers, b"one\n")
    threading.Event().wait()


def silent() -> None:
    """Nobody has anything to say while waiting."""


def test_all_that_was_said_before_the_end_is_heard() -> None:
    with Answering(answers_and_leaves, 3) as child:
        assert list(child.lines(silent)) == [b"0", b"1", b"2"]
        assert child.ending() == "ended the process with exit code 7: no more"
        assert 15_000 < len(child.last_words) <= 16_000 and child.out_of_memory in (False, None)


def test_half_an_answer_is_none() -> None:
    with Answering(answers_and_dies) as child:
        assert list(child.lines(silent)) == [b"one"]
        assert child.ending() == "ended the process by SIGABRT"


def test_a_killed_process_loses_no_answer() -> None:
    with Answering(answers_and_stays) as child:
        lines = child.lines(silent)
        assert next(lines) == b"one"
        child.kill()
        assert list(lines) == [] and child.ending() == "ended the process by SIGKILL"


def test_whoever_waits_may_end_it_all() -> None:
    def cancel() -> None:
        raise KeyboardInterrupt

    with Answering(answers_and_stays) as child, pytest.raises(KeyboardInterrupt):
        list(child.lines(cancel))
    assert child.code == -signal.SIGKILL


def test_kills_of_the_system_are_added_over_all_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that a machine lacks is left out."""
    counters = [tmp_path / "vmstat", tmp_path / "memory.events", tmp_path / "missing"]
    monkeypatch.setattr(forks, "_COUNTERS", counters)
    assert forks.n_oom_kills() is None
    counters[0].write_text("nr_free_pages 7\noom_kill 2\n")
    counters[1].write_text("oom 9\noom_kill 3\noom_group_kill 1\n")
    assert forks.n_oom_kills() == 5


@pytest.mark.parametrize("stop", [signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN])
def test_a_server_that_a_model_stops_goes_on(stop: signal.Signals) -> None:
    """Otherwise each later run would wait for ever. Twice: the second stop is seen too."""
    server = Forks.launch()
    try:
        assert server.pid is not None
        for _ in range(2):
            ear, voice = os.pipe()
            os.kill(server.pid, stop)
            child = server.start(says_who_it_is, files=[voice])
            os.close(voice)
            assert os.read(ear, 100)
            child.close()
            os.close(ear)
        assert server.alive
    finally:
        server.close()


def interrupts() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


def test_a_keyboard_interrupt_in_a_child_is_its_own(server: Forks) -> None:
    """Ctrl-C never reaches a child's group, so Python's handler would only take a model's signal for a person's."""
    child = server.start(interrupts)
    child.wait()
    assert child.code == -signal.SIGINT
    child.close()
