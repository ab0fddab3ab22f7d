"""One worker process with its pipe and the tail of its stderr. Closing a worker ends all processes that it started."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from explorer.child_process.forks import environment
from explorer.errors import ExplorerError
from explorer.jobs.protocol import Command, Event, frame_of, read_frame

_LAST_WORDS_BYTES = 16_000
_PATIENCE_S = 2.0

OnEvent = Callable[["Child", Event], None]
OnEnd = Callable[["Child", int, str], None]
"""Return code (negative: a signal) and last words."""


class Child:
    """A worker process, which starts at once. A thread calls `on_event`, and at the end, exactly once, `on_end`."""

    def __init__(self, command: Sequence[str], on_event: OnEvent, on_end: OnEnd) -> None:
        self._on_event, self._on_end = on_event, on_end
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._last_words = bytearray()
        # A separate session: Ctrl-C in the app's terminal does not reach it, and a kill reaches all its children.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment(),
        )
        self._listener = threading.Thread(target=self._listen, name="worker stderr", daemon=True)
        self._follower = threading.Thread(target=self._follow, name="worker events", daemon=True)
        self._listener.start()
        self._follower.start()
        for work in (self._write, self._reap):
            threading.Thread(target=work, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Sends a command; returns at once, even if the child does not read. `on_end` reports a child that is gone.

        Raises BadInput if a text of the command cannot be written.
        """
        self._commands.put(frame_of(command))

    def kill(self) -> None:
        """Kills the worker at once, with all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the worker by closing its stdin, or by force if the worker stays. Returns when the worker is gone."""
        self._commands.put(None)
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        if threading.current_thread() is not self._follower:
            self._follower.join(_PATIENCE_S)

    def _follow(self) -> None:
        events = _stream(self._process.stdout)
        try:
            while (event := read_frame(events, Event)) is not None:
                self._on_event(self, event)
        except (ExplorerError, OSError) as error:
            self._note(f"\n{error}\n".encode())
            self.kill()
        return_code = self._process.wait()
        self._commands.put(None)
        self._listener.join(_PATIENCE_S)
        events.close()
        self._on_end(self, return_code, self._last_words.decode(errors="replace").strip())

    def _write(self) -> None:
        """Runs in a separate thread: a full pipe to a worker that is stuck must not stop the app."""
        with contextlib.suppress(OSError), _stream(self._process.stdin) as commands:
            while (command := self._commands.get()) is not None:
                commands.write(command)
                commands.flush()

    def _listen(self) -> None:
        stream = _stream(self._process.stderr)
        with contextlib.suppress(OSError), stream:
            while written := os.read(stream.fileno(), 65_536):
                self._note(written)

    def _note(self, written: bytes) -> None:
        self._last_words += written
        del self._last_words[:-_LAST_WORDS_BYTES]

    def _reap(self) -> None:
        """A grandchild that outlives the worker holds the pipes open: it goes too, or the follower would wait on."""
        self._process.wait()
        self.kill()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def worker_command(store_path: Path, *, only_graphs: bool = False) -> tuple[str, ...]:
    """Starts explorer/jobs/worker.py with this interpreter; with `only_graphs` it imports ahead what a graph needs."""
    command = (sys.executable, "-m", "explorer.jobs.worker", "--store", str(store_path))
    return (*command, "--only-graphs") if only_graphs else command
