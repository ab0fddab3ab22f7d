"""No instrument ends a training: each call that one makes raises in turn, and the loop cannot tell.

The calls are found by walking a run that succeeds: every call of a function of the explorer by a function of the
explorer, by place. A profile function raises in it, so that nothing is patched. A compiled training runs compiled
in every step, and the recorded one says so.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import explorer

PACKAGE = str(Path(explorer.__file__).parent)
CONSTRUCTORS = {"watch", "WatchRequest.steps", "Watch.__init__", "record_step", "RecordedStep.__init__"}
"""In front of the loop: their arguments are refused there."""
SHIELDS = {"_LoopTracker._safely.<locals>.noted", "_announced.<locals>.backward"}
SHIELDS |= {
    "Recording.__exit__",
    "CpuRecorder.__exit__",
    "Tracker.__exit__",
    "BlockWatch.__exit__",
    "BlockScopes.__exit__",
}
"""What they call is guarded; they are entered by torch, by each other, or by Python's own ExitStack."""
REFUSED = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
Call = tuple[Any, Any, int]


EVERY_CALL = bool(os.environ.get("EVERY_CALL"))
"""Every call of an instrument raises, which takes minutes; else those of OUTER, and MOST_CALLS of the others."""
MOST_CALLS = 3
OUTER = ("Watch.", "RecordedStep.")


class Injected(Exception):
    """Raised by no one else."""


class Loop:
    """Two steps, then one that is refused memory in the middle of its forward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 4)).sum().backward()
        self.optimizer.step()

    def refused(self) -> None:
        def raises(*_: Any) -> None:
            raise RuntimeError(REFUSED)

        hook = self.model[2].register_forward_pre_hook(raises)
        with pytest.raises(RuntimeError, match="you tried to allocate"):
            self.step()
        hook.remove()

    def left(self) -> list[Any]:
        """What the training carries on, and everything that an instrument may have left behind."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        tensors = [*self.model.parameters(), *(p.grad for p in self.model.parameters()), *state, torch.get_rng_state()]
        of_modules = (held for module in self.model.modules() for held in vars(module).items())
        hooks = [len(hooks) for name, hooks in of_modules if "hooks" in name]
        hooks += [len(p._post_accumulate_grad_hooks or ()) for p in self.model.parameters()]
        hooks += [len(self.optimizer._optimizer_step_post_hooks), len(self.optimizer._optimizer_step_pre_hooks)]
        hooks += [len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)]
        hooks += [len(torch_module._global_forward_hooks), torch._C._len_torch_dispatch_stack()]
        world = [sys.excepthook, torch.autograd.backward, warnings.showwarning, torch._C._autograd._profiler_enabled()]
        from torch._dynamo import eval_frame

        world += [eval_frame._callback_from_stance, eval_frame._stance, torch._C._ForceDispatchKeyGuard]
        return [*(one.detach().clone() for one in tensors if one is not None), *hooks, *world]


def plain(loop: Loop, folder: Path) -> None:
    loop.step()
    loop.step()
    loop.refused()


def record_step(loop: Loop, folder: Path) -> None:
    with explorer.record_step(loop.model, loop.optimizer):
        loop.step()
    loop.step()
    with explorer.record_step(loop.model):
        loop.refused()


def watch(loop: Loop, folder: Path) -> None:
    """`with` an optimizer and without, one recorded when memory is refused, and one that is not."""
    with explorer.watch(loop.model, loop.optimizer, at=2, on_oom=folder / "one.explorer") as watched:
        watched.save_as(str(folder / "step{step}.explorer"))
        loop.step()
        loop.step()
        loop.refused()


def watch_found(loop: Loop, folder: Path) -> None:
    with explorer.watch(loop.model, at=3, worst_of=2, on_oom=folder / "two.explorer"):
        loop.step()
        loop.step()
        loop.refused()


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other for one, other in zip(left, right)
    )


@contextmanager
def called(note: Callable[[Call], None]) -> Iterator[None]:
    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        caller = frame.f_back
        while caller is not None and "contextlib" in caller.f_code.co_filename:
            caller = caller.f_back
        code = None if caller is None else caller.f_code
        if caller is None or code.co_filename[: len(PACKAGE)] != PACKAGE or code.co_qualname in CONSTRUCTORS:
            return
        if frame.f_code.co_qualname not in SHIELDS:
            note((frame.f_code, code, caller.f_lineno))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("instrument", [record_step, watch, watch_found])
def test_the_training_goes_on_whichever_call_raises(instrument: Callable[[Loop, Path], None], tmp_path: Path) -> None:
    expected = Loop()
    plain(expected, tmp_path)
    instrument(Loop(), tmp_path)  # what is imported and cached at first
    calls: dict[Call, None] = {}
    loop = Loop()
    with called(lambda call: calls.setdefault(call)):
        instrument(loop, tmp_path)
    assert same(loop.left(), expected.left()) and len(calls) > 100
    faults = []
    outer = [call for call in calls if call[1].co_qualname.startswith(OUTER)]
    inner = [call for call in calls if call not in outer]
    for chosen in (*outer, *inner[:: 1 if EVERY_CALL else -(-len(inner) // MOST_CALLS)]):
        unharmed, loop, raised = expected.left(), Loop(), []

        def once(call: Call, chosen: Call = chosen, raised: list[Call] = raised) -> None:
            if call == chosen and not raised:
                raised.append(call)
                raise Injected

        try:
            with called(once):
                instrument(loop, tmp_path)
            if not same(loop.left(), unharmed):
                faults.append(f"{place(chosen)}: the training is another, or something stayed")
        except Exception as error:
            faults.append(f"{place(chosen)}: {error!r}")
    assert not faults, f"{len(faults)} of {len(calls)}\n" + "\n".join(faults)


def place(call: Call) -> str:
    callee, caller, line = call
    return f"{callee.co_qualname} called by {caller.co_qualname}:{line}"
