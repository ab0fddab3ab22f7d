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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

import explorer
from explorer.errors import BadInput
from explorer.own_loop.record_step import RecordedRun

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


N_STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CompiledLoop:
    """Steps of a net; `ran` holds the numbers of those in which compiled code ran."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self.ran: set[int] = set()
        self.number = 0
        self.net: Any = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.called: Any = self.net
        self.step: Callable[[], None] = self._step
        if way in ("model", "wrapper", "fullgraph"):
            self.called = torch.compile(self.net, backend=self._backend, fullgraph=way == "fullgraph")
        elif way == "in place":
            self.net.compile(backend=self._backend)
        elif way == "blocks":
            for block in self.net.blocks:
                block.compile(backend=self._backend)
        elif way == "whole step":
            self.step = torch.compile(self._step, backend=self._backend)
        self.watched = self.called if way == "wrapper" else self.net

    def _backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.ran.add(self.number)
            return graph.forward(*args)

        return run

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.called(torch.ones(2, 8)).sum().backward()
        self.optimizer.step()

    def take(self) -> None:
        self.number += 1
        self.step()


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize(
    ("way", "instrument"),
    [
        *((way, "record_step") for way in ("model", "wrapper", "in place", "blocks")),
        *((way, "on_oom") for way in ("fullgraph", "whole step")),
        ("model", "at"),
    ],
)
def test_the_recorded_step_runs_compiled_and_says_so(way: str, instrument: str, tmp_path: Path) -> None:
    loop = CompiledLoop(way)
    recorded = {2}
    if instrument == "record_step":
        loop.take()
        with explorer.record_step(loop.watched, loop.optimizer) as run:
            loop.take()
        runs = [run]
    else:
        recorded |= {1} if instrument == "on_oom" else set()
        file = tmp_path / "oom.explorer" if instrument == "on_oom" else None
        with explorer.watch(loop.watched, loop.optimizer, at=2, on_oom=file) as watch:
            while loop.number < N_STEPS:
                loop.take()
        runs = list(watch.runs.values())
    while loop.number < N_STEPS:
        loop.take()
    assert loop.ran == set(range(1, N_STEPS + 1))
    assert len(runs) == len(recorded)
    for run in runs:
        assert run.measurement.ran_compiled and not run.measurement.ran_as_written
        assert "The step ran compiled" in str(run)
        # The memory was seen, and no block.
        assert run.peak_bytes and not any(cost.n_forward for cost in run.measurement.blocks if "blocks.1" in cost.fqn)
        with pytest.raises(BadInput, match="from a compiled step, whose blocks are not seen"):
            run.plan("60%")
        # What cannot be known of compiled code is not said of its kernels, blocks and reruns.
        assert not any(words in str(run) for words in ("inside kernels", "work memory of a kernel", "ran again for"))


class Halves(nn.Module):
    """A compiled block inside a block that runs as written, and blocks after it."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.encoder[1].compile(backend=backend)
        self.head = nn.Linear(8, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_bytes_after_compiled_code_are_of_no_block_that_had_begun(checkpointed: bool) -> None:
    model = Halves("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if checkpointed:
        plain = model.encoder.forward
        model.encoder.forward = lambda x: checkpoint(plain, x, use_reentrant=False)  # type: ignore[method-assign]
    for recorded in (False, True):
        with explorer.record_step(model, optimizer) if recorded else nullcontext(RecordedRun()) as run:
            model(torch.randn(64, 8, requires_grad=True)).square().mean().backward()
            optimizer.step()
    measurement = run.measurement
    assert measurement.ran_compiled and measurement.allocations is not None
    log = measurement.allocations
    large = {log.blocks[block] for block, n in zip(log.block, log.n_bytes) if n == 64 * 4096 * 4}
    assert large == {""}
    phases = [span.phase for span in measurement.phases]
    assert "recompute" not in phases[phases.index("forward") :]
    assert "encoder" not in str(run)


@pytest.mark.usefixtures("compiler")
def test_a_step_without_compiled_code_says_nothing_of_it() -> None:
    loop = CompiledLoop("eager")
    with explorer.record_step(loop.net, loop.optimizer) as run:
        loop.take()
    assert not run.measurement.ran_compiled and "compiled" not in str(run)
