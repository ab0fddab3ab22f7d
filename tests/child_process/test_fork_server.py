"""A process forked for somebody leads a group, and with it ends all that it started, children and daemons alike."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from explorer.child_process.forks import Forks, at_hand


@pytest.fixture
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


def all_said(ear: int) -> bytes:
    """Until nobody holds the other end of the pipe any more."""
    with os.fdopen(ear, "rb") as file:
        return file.read()


def test_how_a_child_ended_is_known(server: Forks) -> None:
    nobody = os.open(os.devnull, os.O_WRONLY)
    left, failed = server.start(os.getpid), server.start(fails, errors=nobody)
    killed = server.start(signal.pause)
    assert left.wait() and failed.wait() and (left.code, failed.code) == (0, 1)
    killed.kill()
    assert killed.wait() and killed.code == -signal.SIGKILL
    for child in (left, failed, killed):
        child.close()
    os.close(nobody)


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
    assert child.wait()
    assert all_said(ear) == b""  # ends only once the other process has let go of the pipe
    child.close()


def test_with_the_server_ends_whoever_runs() -> None:
    server = Forks.launch()
    ear, voice = os.pipe()
    child = server.start(waits, files=[voice])
    os.close(voice)
    assert child.pid is not None
    server.close()
    assert all_said(ear) == b"" and child.ended and not server.alive
    child.close()
