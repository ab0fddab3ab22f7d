"""One worker process: its events and then its end are told, once, with its last words, and nothing of it stays."""

from __future__ import annotations

import queue
import re
import sys
from pathlib import Path

from explorer.jobs.child import Child, worker_command
from explorer.jobs.protocol import CancelJob, Event, Failed
from tests.jobs.jobs_at_hand import LONG_S, wait_gone

ECHO = """
import sys
from explorer.jobs.protocol import CancelJob, Command, Failed, read_frame, write_frame
from explorer.record.failure import Failure
while (command := read_frame(sys.stdin.buffer, Command)) is not None:
    write_frame(sys.stdout.buffer, Failed(job=command.job, failure=Failure(kind="cancelled", sentence="heard")))
"""


class Told:
    """What the child's thread tells."""

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
    told = Told()
    child = told.child(ECHO)
    for job in ("1", "2"):
        child.send(CancelJob(job=job))
        event = told.events.get(timeout=LONG_S)
        assert isinstance(event, Failed) and event.job == job
    child.close()
    assert told.ends.get(timeout=LONG_S) == (0, "")
    child.close()  # once more does no harm
    assert told.ends.empty()


def test_its_last_words_are_kept() -> None:
    told = Told()
    told.child("import sys; sys.stderr.write('x' * 20_000 + 'the end'); sys.exit(4)")
    code, words = told.ends.get(timeout=LONG_S)
    assert code == 4 and words.endswith("xthe end") and len(words) == 16_000


def test_what_is_no_event_ends_it() -> None:
    told = Told()
    told.child(
        "import sys, time; sys.stdout.buffer.write(b'\\1' + bytes(7) + b'\\xff'); sys.stdout.flush(); time.sleep(600)"
    )
    code, words = told.ends.get(timeout=LONG_S)
    assert code == -9 and words


def test_a_killed_one_takes_along_what_it_started() -> None:
    told = Told()
    child = told.child(
        "import subprocess, sys, time; other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
        "; sys.stderr.write(f'[{other.pid}]'); sys.stderr.flush()"
        "; sys.stdout.buffer.write(b'\\1' + bytes(7) + b'\\xff'); sys.stdout.flush(); time.sleep(600)"
    )
    _, words = told.ends.get(timeout=LONG_S)
    (started,) = re.findall(r"\[(\d+)\]", words)  # before or behind what its end is put down to
    wait_gone(child.pid, int(started))


def test_the_real_one_is_a_module_of_this_interpreter() -> None:
    command = worker_command(Path("/there/runs.sqlite"))
    assert command == (sys.executable, "-m", "explorer.jobs.worker", "--store", "/there/runs.sqlite")
