"""A training script under watch: `checkpoint-explorer run train.py --at 2 --on-oom oom.explorer -- --lr 1e-4`.

The models are found at the script's optimizers: outermost modules that together hold the parameters of all of them.
Until the first step has ended, each new optimizer adds its models. The script is neither read nor changed. Arguments,
name and folder are those of `python train.py`.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from explorer.engine.policy.several_models import models_of, named_models, one_model
from explorer.engine.watch.scopes import around_backward
from explorer.errors import BadInput, namesake
from explorer.jobs import run_file
from explorer.own_loop.watch import Watch
from explorer.own_loop.watch_request import WatchRequest, no_answer
from explorer.own_loop.workers import watched_workers
from explorer.record.base import from_msgpack
from explorer.record.measurement import Measurement

StepLog = Callable[[int, dict[str, float]], object]


_running: list[ScriptUnderWatch] = []
"""The script that runs in this process, if one does."""


@contextmanager
def in_worker(script: Path, request: WatchRequest, folder: Path) -> Iterator[None]:
    """Watches a process that the script started, which leaves the names of its files in `folder`.

    A forked process has the hooks of the process that it came from.
    """
    watched = _running[0] if _running else ScriptUnderWatch(script, request=request)
    try:
        with closing(watched) if _running else watched.watching():
            yield
    finally:
        lines = [f"{step} {path.resolve()}\n" for step, path in watched.written.items()]
        (folder / str(os.getpid())).write_text("".join(lines))


class ScriptUnderWatch:
    """Runs a script once. `watch` is None if the script made no optimizer of a model."""

    def __init__(
        self,
        script: Path,
        log: StepLog | None = None,
        is_module: bool = False,
        request: WatchRequest | None = None,
        **fields: Any,
    ) -> None:
        """`fields`: those of `request`. `log`: see `Watch.log_to`. `is_module`: run as `python -m`.

        Raises BadInput for a missing script.
        """
        if not script.is_file():
            raise BadInput(f"There is no script {script}.", hint="Give the file that `python` would be given.")
        self.watch: Watch | None = None
        self._module = module_of(script, is_module=is_module)
        self._log = log
        self._optimizers: list[Optimizer] = []
        self._script, self._request = script, request or WatchRequest(**fields)
        self._in_workers: dict[int, Path] = {}

    @property
    def written(self) -> dict[int, Path]:
        """Files of requested steps; if processes of the script took the steps, those of the first rank."""
        return self._in_workers if self.watch is None else self.watch.written

    @property
    def found_model(self) -> bool:
        """Whether the script, or a process of it, made an optimizer of a model's parameters."""
        return self.watch is not None or bool(self._in_workers)

    @property
    def n_steps(self) -> int:
        """Steps that have ended, as far as they are known."""
        return max(self._in_workers, default=0) if self.watch is None else self.watch.n_steps

    def run(self, arguments: Sequence[str]) -> None:
        """Runs the script. Its errors and SystemExit pass through; an out-of-memory passes after its file is saved."""
        if sentence := namesake(self._script.resolve().parent):
            self._request.say(sentence)
        quiet = replace(self._request, say=no_answer, recorded=no_answer)
        with tempfile.TemporaryDirectory() as folder:
            workers = watched_workers(partial(in_worker, self._script, quiet, Path(folder)))
            try:
                with _as_main(self._script, arguments, self._module), self.watching(), workers:
                    if self._module:
                        runpy.run_module(self._module, run_name="__main__", alter_sys=True)
                    else:
                        runpy.run_path(str(self._script), run_name="__main__")
            finally:
                self._take_from_workers(Path(folder))

    def _take_from_workers(self, folder: Path) -> None:
        """The files that processes of the script have written: of each step that of the first rank."""
        lines = [line for note in folder.iterdir() for line in note.read_text().splitlines()]
        for line in sorted(lines, reverse=True):
            step, _, path = line.partition(" ")
            self._in_workers[int(step)] = Path(os.path.relpath(path))
        for number, file in self._in_workers.items():
            self._request.say(f"Wrote step {number} to {file}.")
            self._request.recorded(from_msgpack(run_file.read(file.read_bytes()).record, Measurement), file)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the models of the optimizers that are made meanwhile in this process."""
        before = _running.copy()
        with self._optimizers_seen(), self._first_backward_heard():
            _running[:] = [self]
            try:
                yield
            except Exception as error:
                if self.watch is not None:
                    self.watch.refused(error)
                raise
            finally:
                _running[:] = before
                self.close()

    def close(self) -> None:
        """Ends the watch; a step that is still wanted is written."""
        if self.watch is not None:
            self.watch.close()

    def _watch(self, optimizer: Optimizer) -> None:
        """Watches the models of all optimizers so far. A watch that has seen no step yet is replaced."""
        self._optimizers.append(optimizer)
        if not (models := models_of(self._optimizers)):
            return
        if self.watch is not None:
            self.watch.close()
        self.watch = Watch(one_model(named_models(models)), self._optimizers, self._request, self._script.name)
        if self._log is not None:
            self.watch.log_to(self._log)

    @contextmanager
    def _first_backward_heard(self) -> Iterator[None]:
        """Says at the first backward if the script has no optimizer by then, because no step can be found."""

        def begins() -> None:
            listening.close()
            if not self._optimizers:  # a recording that opens runs a small backward of its own
                self._request.say(
                    f"{self._script.name} runs backward without an optimizer of torch: a step by hand has no end that "
                    "can be heard, so nothing is recorded. Put explorer.record_step(model) around one step in it."
                )

        with ExitStack() as listening:
            listening.enter_context(around_backward(begins))
            yield

    @contextmanager
    def _optimizers_seen(self) -> Iterator[None]:
        plain = Optimizer.__init__

        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            if self.watch is None or not self.watch.n_steps:
                self._watch(optimizer)

        Optimizer.__init__ = made  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Optimizer.__init__ = plain  # type: ignore[method-assign]


def module_of(script: Path, *, is_module: bool = False) -> str:
    """`package.train` for a module, and for a file that imports from its own package (`from . import`); else empty.

    Python runs such a file only as `python -m package.train`.
    """
    names, folder = [script.stem], script.resolve().parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    if is_module:
        return ".".join(names)
    is_relative = re.search(r"^\s*from \.", script.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return ".".join(names) if is_relative and len(names) > 1 else ""


@contextmanager
def _as_main(script: Path, arguments: Sequence[str], module: str) -> Iterator[None]:
    """Sets sys.argv and the first import path as Python does for a script, and restores both."""
    before = (sys.argv, sys.path[:])
    sys.argv = [str(script), *arguments]
    depth = module.count(".") if module else 0
    sys.path.insert(0, str(script.resolve().parents[depth]))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
