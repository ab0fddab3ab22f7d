"""A training script under watch: `python -m explorer run train.py --at 2 --on-oom oom.explorer -- --lr 1e-4`.

The model is found at the script's first optimizer: the outermost module with the most of the optimizer's parameters.
The script is neither read nor changed. Arguments, name and folder are those of `python train.py`.
"""

from __future__ import annotations

import gc
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from explorer.errors import BadInput
from explorer.own_loop.watch import Watch, WatchRequest


class ScriptUnderWatch:
    """Runs a script once. `watch` is None if the script made no optimizer of a model."""

    def __init__(self, script: Path, *, at: Sequence[int], on_oom: Path | None, files: str) -> None:
        """`files`: path of a chosen step's file, with `{step}` for the number. Raises BadInput for a missing script."""
        if not script.is_file():
            raise BadInput(f"There is no script {script}.", hint="Give the file that `python` would be given.")
        self.watch: Watch | None = None
        self._script, self._request = script, WatchRequest(at=at, on_oom=on_oom, files=files)

    def run(self, arguments: Sequence[str]) -> None:
        """Runs the script. Its errors and SystemExit pass through; an out-of-memory passes after its file is saved."""
        with _as_main(self._script, arguments), self._optimizers_seen():
            try:
                runpy.run_path(str(self._script), run_name="__main__")
            except Exception as error:
                if self.watch is not None:
                    self.watch.refused(error)
                raise
            finally:
                if self.watch is not None:
                    self.watch.close()

    @contextmanager
    def _optimizers_seen(self) -> Iterator[None]:
        plain = Optimizer.__init__

        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            if self.watch is None and (model := model_of(optimizer)) is not None:
                self.watch = Watch(model, optimizer, self._request, self._script.name)

        Optimizer.__init__ = made  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Optimizer.__init__ = plain  # type: ignore[method-assign]


def model_of(optimizer: Optimizer) -> nn.Module | None:
    """The outermost module with the most parameters of `optimizer`; None: no living module holds a parameter."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    holders: list[tuple[int, nn.Module]] = []
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and "_parameters" in vars(thing):
            n_held = len(trained & {id(parameter) for parameter in thing.parameters()})
            if n_held:
                holders.append((n_held, thing))
    most = max((n_held for n_held, _ in holders), default=0)
    full = [module for n_held, module in holders if n_held == most]
    return max(full, key=lambda module: sum(1 for _ in module.modules()), default=None)


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Sets sys.argv and the first import path as Python does for a script, and restores both."""
    before = (sys.argv, sys.path[:])
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
