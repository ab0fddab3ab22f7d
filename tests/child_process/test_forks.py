"""Forked processes: their answers, their end in words, and a server that is gone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import pytest

from explorer.child_process.forks import Answering, Forked, Forks


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


LONG_S = 600.0


def answers_and_leaves(count: int, answers: int) -> None:
    for number in range(count):
        os.write(answers, b"%d\n" % number)
    print("no more", file=sys.stderr)
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
        assert list(child.lines(time.monotonic() + LONG_S, silent)) == [b"0", b"1", b"2"]
        assert child.ending() == "ended the process with exit code 7: no more"
        assert child.ended and not child.killed and not child.timed_out


def test_half_an_answer_is_none() -> None:
    with Answering(answers_and_dies) as child:
        assert list(child.lines(time.monotonic() + LONG_S, silent)) == [b"one"]
        assert child.ending() == "ended the process by SIGABRT" and not child.killed


def test_out_of_time_is_told_from_killed_and_loses_no_answer() -> None:
    with Answering(answers_and_stays) as child:
        lines = child.lines(time.monotonic() + LONG_S, silent)
        assert next(lines) == b"one"
        child._process.kill()
        assert list(lines) == [] and child.killed and child.ending() == "ended the process by SIGKILL"
    with Answering(answers_and_leaves, 2) as child:
        child._process.wait()
        assert list(child.lines(time.monotonic() - 1, silent)) == [b"0", b"1"] and not child.timed_out
    with Answering(answers_and_stays) as child:
        assert set(child.lines(time.monotonic() - 1, silent)) <= {b"one"}
        assert child.timed_out and not child.killed


def test_whoever_waits_may_end_it_all() -> None:
    def cancel() -> None:
        raise KeyboardInterrupt

    with Answering(answers_and_stays) as child, pytest.raises(KeyboardInterrupt):
        list(child.lines(time.monotonic() + LONG_S, cancel))
    assert child._process.code == -signal.SIGKILL
