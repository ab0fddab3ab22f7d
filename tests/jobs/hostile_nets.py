"""Models that break the process they are built in, by class; and a plain one that writes down the bits of its steps."""

from __future__ import annotations

import hashlib
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from explorer.child_process.forks import LENGTH, at_hand


def plain(path: str) -> tuple[nn.Module, Tensor]:
    """Its hooks append parameters and gradients, as they are in every step, to `path`."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 4))

    def note(what: str, tensors: list[Tensor]) -> None:
        digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))
        with Path(path).open("a") as file:
            file.write(f"{what} {digest.hexdigest()}\n")

    model.register_forward_pre_hook(lambda module, args: note("forward", [*module.state_dict().values(), *args]))
    model[0].register_full_backward_hook(lambda module, gradients, _: note("gradient", list(_)))
    return model, torch.randn(8, 16)


def allocate_for_ever() -> None:
    kept = []
    while True:
        kept.append(torch.ones(1000))
        del kept[:-100]


def leak_handles() -> None:
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        sys.held = held  # type: ignore[attr-defined]
    for file in held[:40]:  # enough for this run to end
        os.close(file)


def patch_linear() -> None:
    nn.Linear.forward = lambda self, x: x.sum() * self.weight.new_ones(*x.shape[:-1], self.out_features)  # type: ignore[method-assign]


def leave_hooks() -> None:
    nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 1.5)


def leave_a_daemon() -> None:
    """Two forks and a session of its own: nobody's child, in nobody's group. Returns once its number is written."""
    path = Path(os.environ["DAEMON"])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            part = path.with_suffix(".part")
            part.write_text(str(os.getpid()))
            part.rename(path)
            signal.pause()
        os._exit(0)
    while not path.exists():
        time.sleep(0.01)


class Float64:
    """Unpickled, it changes the numbers of every later run."""

    def __reduce__(self) -> tuple[object, ...]:
        return torch.set_default_dtype, (torch.float64,)


def send_pickles() -> None:
    """To the fork server as its client sends them, and to every socket as requests were before 2026-11."""
    at_hand().start(print, Float64(), needs=["explorer.engine.bench.step"]).close()
    frame = pickle.dumps((Float64(), "print", (), ()))
    for file in filter(_is_open_pipe, range(3, 64)):
        with suppress(OSError), socket.socket(fileno=os.dup(file)) as line:
            line.settimeout(1.0)
            socket.send_fds(line, [LENGTH.pack(len(frame)) + frame], [2, 2])


HOSTILE: dict[str, Callable[[], object]] = {
    "patched Linear": patch_linear,
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "autocast left on": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "global hooks": leave_hooks,
    "a thread that allocates": lambda: threading.Thread(target=allocate_for_ever, daemon=True).start(),
    "an alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 1.5),
    "leaked handles": leak_handles,
    "chdir": lambda: os.chdir("/"),
    "environment": lambda: os.environ.update({"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": "", "HOME": "/none"}),
    "signal handlers": lambda: [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGCHLD)],
    "modules removed": lambda: [sys.modules.pop(name) for name in list(sys.modules) if name.startswith("explorer.rec")],
    "standard files closed": lambda: os.closerange(0, 3),
    "its own group killed": lambda: os.killpg(0, signal.SIGKILL),
    "pickles sent to every socket": send_pickles,
    "writes into every file": lambda: [os.write(file, b"x" * 64) for file in range(3, 64) if _is_open_pipe(file)],
}


def hostile(name: str) -> tuple[nn.Module, Tensor]:
    inputs, model = torch.randn(2, 4), nn.Linear(4, 4)
    HOSTILE[name]()
    return model, inputs


class Odd(nn.Linear):
    """A Linear that does one thing in a place where models seldom do any."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ODD_WORDS:
            raise ValueError(ODD_WORDS[self.how])
        if self.how == "forks":
            os.fork()
        if self.how == "lowers its limit":
            resource.setrlimit(resource.RLIMIT_AS, (2**38, 2**38))
        return super().forward(x)

    def train(self, mode: bool = True) -> Odd:
        if self.how == "cannot evaluate" and not mode:
            raise ValueError("no evaluation here")
        return super().train(mode)

    def parameters(self, recurse: bool = True) -> Any:
        if self.how == "has no parameters list":
            raise ValueError("no list here")
        return super().parameters(recurse)


ODD_WORDS = {"says half of a letter": "half \udcff of it", "says 50 MB": "on and on. " * 5_000_000}
ODD = {  # what it does, and what becomes of the run
    **dict.fromkeys(ODD_WORDS, "model raised"),
    "has no parameters list": "model raised",
    "forks": None,
    "lowers its limit": None,
    "cannot evaluate": None,
}


def odd(how: str) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 4), Odd(how)), torch.randn(2, 4)


def daemon(path: str) -> tuple[nn.Module, Tensor]:
    os.environ["DAEMON"] = path
    leave_a_daemon()
    return nn.Linear(4, 4), torch.randn(2, 4)


def _is_open_pipe(file: int) -> bool:
    try:
        return str(Path(f"/proc/self/fd/{file}").readlink()).startswith(("pipe", "socket"))
    except OSError:
        return False
