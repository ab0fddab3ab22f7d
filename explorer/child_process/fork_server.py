"""The clean process of forks.py: `python -m explorer.child_process.fork_server SOCKET [MODULE ...]`.

1. The server imports modules, forks children and reaps them. The server runs no model, starts no thread, uses no CUDA.
2. Every child leads a process group. When a child ends, its group and the children that it requested end too. When no
   child is left, daemons end as well: the kernel reparents daemons to this process.
3. The server ends, with all its children, when the process that launched the server ends.
4. A request is names and bytes: the server imports modules of IMPORTABLE alone, and only the child unpickles.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from explorer import slices
from explorer.child_process import forks
from explorer.child_process.forks import LENGTH, NUMBER

_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # of linux/prctl.h
_PATIENCE_S = 5.0
IMPORTABLE = ("explorer.engine.", "explorer.jobs.", *(f"explorer.{name}." for name in slices.names()))
"""Packages of which a process may name a module to import here, beside WARM. Other modules are the child's to import:
a model could have written them."""


@dataclass(frozen=True)
class _Child:
    status: int
    owner: socket.socket
    """Socket of the process that requested the child."""
    requests: socket.socket
    """Socket on which the child requests more processes."""


class _Server:
    def __init__(self, launcher: socket.socket, warm: Sequence[str]) -> None:
        self._launcher = launcher
        self._customers = {launcher}
        self._children: dict[int, _Child] = {}
        self._warm = list(warm)
        self._bell, ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(ring, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
        self._ring = ring

    def run(self) -> NoReturn:
        while True:
            listened: list[Any] = [*self._customers, self._bell]
            ready, _, _ = select.select(listened, [], [], 0 if self._warm else None)
            if self._bell in ready:
                with suppress(BlockingIOError):
                    os.read(self._bell, 4096)
                self._bury()
            for customer in self._customers & set(ready):
                self._serve(customer)
            if not ready:
                _import(self._warm.pop(0))

    def _serve(self, customer: socket.socket) -> None:
        files: list[int] = []
        try:
            head, files, _, _ = socket.recv_fds(customer, LENGTH.size, 16)
            what = _receive(customer, LENGTH.unpack(head)[0]) if files else b""
        except (OSError, EOFError, struct.error):
            what = b""
        if not what and customer is self._launcher:
            self._end()
        try:
            self._fork(customer, what, files)
        except ValueError:  # the customer has ended, or its model wrote into a file that is not its own
            self._customers.discard(customer)
        for file in files:
            os.close(file)

    def _fork(self, owner: socket.socket, request: bytes, files: Sequence[int]) -> None:
        """Forks a child for `request`. Raises ValueError if `request` is malformed."""
        (module, _, *needs), _ = forks.names_and_arguments(request)
        status, errors, *passed = files
        os.set_blocking(status, False)  # a pipe that is full must not stop the server
        for name in (module, *needs):
            if name in forks.WARM or name.startswith(IMPORTABLE):
                _import(name)
        requests, childs_end = socket.socketpair()
        requests.settimeout(_PATIENCE_S)
        server = os.getpid()
        gc.freeze()  # no child collects the imported modules: collection is ten times as fast, pages stay shared
        if (pid := os.fork()) == 0:
            os.setpgid(0, 0)
            _die_with(server)
            os.dup2(errors, 2)
            os.dup2(2, 1)
            for file in (status, errors, requests.detach()):
                os.close(file)
            self._forget_all()
            gc.enable()
            _live(childs_end, request, passed)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        childs_end.close()
        self._customers.add(requests)
        self._children[pid] = _Child(os.dup(status), owner, requests)
        _say(status, pid)

    def _forget_all(self) -> None:
        """Closes, in a child, the files and handlers of the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is not for a child: a KeyboardInterrupt is its model's
        for customer in self._customers:
            customer.close()
        for file in (self._bell, self._ring, *(child.status for child in self._children.values())):
            os.close(file)

    def _bury(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._tidy(*ended)

    def _tidy(self, pid: int, status: int) -> None:
        """Rule 2."""
        child = self._children.pop(pid, None)
        if child is None:
            return
        _kill(-pid)
        for other in [other for other, record in self._children.items() if record.owner is child.requests]:
            _kill(other)
            self._tidy(*os.waitpid(other, 0))
        if not self._children:
            _end_strays()
        self._customers.discard(child.requests)
        child.requests.close()
        _say(child.status, os.waitstatus_to_exitcode(status))
        os.close(child.status)

    def _end(self) -> NoReturn:
        for pid in self._children:
            _kill(-pid)
        _end_strays()
        os._exit(0)


def _live(server: socket.socket, request: bytes, files: Sequence[int]) -> NoReturn:
    code = 1
    try:
        forks.begin(server, request, files)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _import(name: str) -> None:
    """Imports a module. A failure is silent here: the child that needs the module repeats the import and fails."""
    with suppress(Exception):
        importlib.import_module(name)


def _receive(customer: socket.socket, n_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < n_bytes:
        part = customer.recv(min(n_bytes - len(received), 65_536))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def _say(status: int, number: int) -> None:
    with suppress(OSError):
        os.write(status, NUMBER.pack(number))


def _kill(pid: int) -> None:
    """A negative one: the group."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _end_strays() -> None:
    while strays := _children_of(os.getpid()):
        for pid in strays:
            _kill(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children_of(parent: int) -> list[int]:
    children = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(path.name))
    return children


def _die_with(parent: int) -> None:
    _prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main() -> None:
    launcher, *warm = sys.argv[1:]
    gc.disable()  # the search of imported modules for garbage took a fifth of the imports' time
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that launched this one
    _prctl(_ADOPT_ORPHANS, 1)
    _Server(socket.socket(fileno=int(launcher)), warm).run()


if __name__ == "__main__":
    main()
