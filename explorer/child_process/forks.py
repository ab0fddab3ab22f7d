"""Clean processes, forked from a server that has imported torch, never ran a model and never started CUDA.

    this process ── socket: function, arguments, files ──▶  fork_server.py ── fork ──▶ function(*arguments, *files)
                 ◀─ a pipe a process: its id, then how it ended ──────┘

A forked process has its own socket to the same server and may start more processes. When a process ends, the
processes that it started end too. A process that no server started launches a server.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import explorer
from explorer.errors import Crashed

LENGTH = struct.Struct("<Q")
NUMBER = struct.Struct("<i")
EMPTY: Mapping[str, str] = {}
_CGROUP = Path("/sys/fs/cgroup")
_COUNTERS = [Path("/proc/vmstat"), _CGROUP / "memory.events", _CGROUP / "memory/memory.oom_control"]
_PATIENCE_S = 2.0
WARM = (
    "explorer.engine.model.describe",
    "explorer.engine.compare.compare",
    "torch._dynamo",  # the first checkpoint call imports it (seconds)
    "explorer.engine.bench.other_tools",
)
"""Modules that the server imports while it is idle. No import may start a thread of torch or CUDA."""

_parents_server: Forks | None = None
_launched: Forks | None = None
_launching = threading.Lock()


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """`settings` under the environment of this process, with this package importable from any working directory."""
    paths = (str(Path(explorer.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", ""))
    return {**settings, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Forked:
    """A forked process: its id, its end and its exit code."""

    def __init__(self, status: int, server: Forks) -> None:
        self._status, self._server = status, server
        self._pid: int | None = None
        self._ended = False
        self._reading = threading.Lock()
        self.code: int | None = None
        """Exit code after the end, negative for a signal; None if the server is gone and the code is unknown."""

    def fileno(self) -> int:
        """Readable when there is news, for `select`."""
        return self._status

    @property
    def pid(self) -> int | None:
        """Waits until the process has begun; None if the process never begins."""
        while not self.ended and self._pid is None:
            select.select([self._status], [], [])
        return self._pid

    @property
    def ended(self) -> bool:
        with self._reading:
            while not self._ended and select.select([self._status], [], [], 0)[0]:
                self._take(os.read(self._status, NUMBER.size))
            return self._ended

    def wait(self) -> None:
        """Waits until the process has ended."""
        while not self.ended:
            select.select([self._status], [], [])

    def kill(self) -> None:
        """Kills the process and its process group."""
        if (pid := self.pid) is not None and not self.ended:
            _kill_group(pid)

    def close(self) -> None:
        """Kills it if it still runs; returns when it is gone."""
        if self._status < 0:
            return
        self.kill()
        self.wait()
        os.close(self._status)
        self._status = -1

    def _take(self, news: bytes) -> None:
        if len(news) < NUMBER.size:  # without a server, no other process ends the group
            self._server.gone = True
            if self._pid is not None:
                _kill_group(self._pid)
            self._ended = True
        elif self._pid is None:
            self._pid = int(NUMBER.unpack(news)[0])
        else:
            self.code, self._ended = int(NUMBER.unpack(news)[0]), True


class Forks:
    """A fork server as its customers see it. Several threads may start processes at once."""

    def __init__(self, server: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._server, self._process = server, process
        self.gone = False
        """True once a process of the server has lost it, which may come before the server's socket closes."""
        self._sending = threading.Lock()

    @classmethod
    def launch(cls, warm: Sequence[str] = (), settings: Mapping[str, str] = EMPTY, errors: int = 2) -> Forks:
        """A new server, which imports `warm` one by one while it is idle. The server ends with this process.

        `settings` are environment variables that this process may override. `errors` is the file for stdout and stderr.
        """
        ours, servers = socket.socketpair()
        with servers:
            process = subprocess.Popen(
                # -P: an explorer.py of the user in this folder would be imported instead of this package
                [sys.executable, "-P", "-m", "explorer.child_process.fork_server", str(servers.fileno()), *warm],
                stdin=subprocess.DEVNULL,
                stdout=errors,  # output of a model
                stderr=errors,
                pass_fds=[servers.fileno()],
                process_group=0,  # outlives a kill of this process's group, and then ends its children
                env=environment(settings),
            )
        Thread(target=_keep_running, args=(process.pid,), name="fork server", daemon=True).start()
        return cls(ours, process)

    def start(
        self,
        function: Callable[..., object],
        *arguments: object,
        files: Sequence[int] = (),
        errors: int = 2,
        needs: Sequence[str] = (),
    ) -> Forked:
        """`function(*arguments, *files)` in a new process, once the server has imported the modules that it `needs`.

        `function` is found by its name, `arguments` are pickled, `files` and `errors` (its stdout and stderr) are file
        descriptors, open here. Raises Crashed if the server is gone.
        """
        ear, voice = os.pipe()
        names = " ".join((function.__module__, function.__qualname__, *needs))
        request = names.encode() + b"\n" + pickle.dumps(arguments)
        try:
            with self._sending:
                socket.send_fds(self._server, [LENGTH.pack(len(request))], [voice, errors, *files])
                self._server.sendall(request)
        except OSError as error:
            os.close(ear)
            raise server_is_gone() from error
        finally:
            os.close(voice)
        return Forked(ear, self)

    @property
    def pid(self) -> int | None:
        """Process of a server that this process launched."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """A server that is being killed has hung up before the system knows it as ended."""
        if self.gone or (self._process is not None and self._process.poll() is not None):
            return False
        line = select.poll()
        line.register(self._server, 0)  # a hang-up is reported without being registered
        return not line.poll(0)

    def close(self) -> None:
        """Ends the server and all processes that it started."""
        self._server.close()
        if self._process is not None:
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:  # it imports something large
                self._process.kill()
                self._process.wait()


def _keep_running(pid: int) -> None:
    """Lets a server go on that a model has stopped: a stopped server starts nothing, and its customers wait for ever.

    Returns when the server has ended.
    """
    with suppress(ChildProcessError):  # already waited for
        while (change := os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)) is not None:
            if change.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
                return
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)  # the same stop is not reported again
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def server_is_gone() -> Crashed:
    return Crashed(
        "The fork server, the process that starts the others, was ended from outside.",
        hint="The next run starts a new one: run it again.",
    )


def at_hand() -> Forks:
    """The server that forked this process, else a server launched by this process."""
    global _launched
    if _parents_server is not None:
        return _parents_server
    with _launching:
        if _launched is None or not _launched.alive:
            _launched = Forks.launch()
            atexit.register(_launched.close)
        return _launched


def names_and_arguments(request: bytes) -> tuple[list[str], bytes]:
    """Module, function and the modules that it needs; then the arguments, still pickled. Raises ValueError."""
    names, newline, arguments = request.partition(b"\n")
    words = names.decode().split()
    if not newline or len(words) < 2:
        raise ValueError("a request names a module and a function")
    return words, arguments


def begin(server: socket.socket, request: bytes, files: Sequence[int]) -> None:
    """The first call in a forked process. `server` is the socket to start more processes."""
    global _parents_server, _launched
    _parents_server, _launched = Forks(server), None
    (module, name, *_), arguments = names_and_arguments(request)
    function: Any = getattr(importlib.import_module(module), name)
    function(*pickle.loads(arguments), *files)


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 250` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def n_oom_kills() -> int | None:
    """Number of processes that the system has ended for lack of memory, over all counters; None without a counter.

    A count that grows shows that a SIGKILL in the meantime came from the system.
    """
    lines = [line for path in _COUNTERS if path.is_file() for line in path.read_text().splitlines()]
    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return sum(counts) if counts else None


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


_POLL_S = 0.25
_CHUNK_BYTES = 1 << 20
_LAST_WORDS_BYTES = 16_000


class Answering:
    """`function(*arguments, answers, *files)` in a process of `server`, which begins at once; `answers` is a pipe here.

    The tail of its stdout and stderr is kept. Raises Crashed if the fork server is gone.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: object,
        files: Sequence[int] = (),
        needs: Sequence[str] = (),
        server: Forks | None = None,
    ) -> None:
        self._n_oom_kills = n_oom_kills()
        self._last_words = bytearray()
        self._answers, answers = os.pipe()
        self._errors, errors = os.pipe()
        try:
            start = (server or at_hand()).start
            self._process = start(function, *arguments, files=[answers, *files], errors=errors, needs=needs)
        except Crashed:
            os.close(self._answers)
            os.close(self._errors)
            raise
        finally:
            os.close(answers)
            os.close(errors)

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, with all processes that it has started."""
        self._process.close()
        os.close(self._answers)
        os.close(self._errors)

    def kill(self) -> None:
        """Kills the process, from any thread."""
        self._process.kill()

    @property
    def code(self) -> int | None:
        """Exit code once it has ended: negative is a signal; None: the fork server is gone."""
        return self._process.code

    @property
    def last_words(self) -> str:
        """The tail of what it printed."""
        return self._last_words.decode(errors="replace").strip()

    @property
    def out_of_memory(self) -> bool | None:
        """True if the system reports that it ended a process for lack of memory meanwhile; None: no report."""
        now = n_oom_kills()
        return None if self._n_oom_kills is None or now is None else now > self._n_oom_kills

    def chunks(self, alive: Callable[[], None] | None = None) -> Iterator[bytes]:
        """Its answers as they arrive, until it has ended. `alive` is called while waiting and may raise."""
        listened = [self._answers, self._errors]
        while True:
            ready, _, _ = select.select([*listened, self._process.fileno()], [], [], _POLL_S if alive else None)
            over = self._process.ended
            if over:  # earlier answers are still in the pipes
                ready, _, _ = select.select(listened, [], [], 0)
            if not ready and alive is not None:
                alive()
            for file in [file for file in listened if file in ready]:
                written = os.read(file, _CHUNK_BYTES)
                if not written:
                    listened.remove(file)
                elif file == self._answers:
                    yield written
                else:
                    self._last_words += written
                    del self._last_words[:-_LAST_WORDS_BYTES]
            if over:  # a chunk is larger than a pipe: nothing is left
                return

    def lines(self, alive: Callable[[], None]) -> Iterator[bytes]:
        """Its answers as lines, until it has ended. `alive` is called while waiting and may raise."""
        answered = b""
        for chunk in self.chunks(alive):
            *lines, answered = (answered + chunk).split(b"\n")
            yield from lines

    def ending(self) -> str:
        """The end of a process without an answer, in words: `ended the process by SIGSEGV`."""
        code = self.code
        if code is None:
            return server_is_gone().sentence
        if code < 0:
            return f"ended the process by {signal_name(-code)}"
        lines = self.last_words.splitlines()
        return f"ended the process with exit code {code}: {lines[-1] if lines else 'it said nothing'}"
