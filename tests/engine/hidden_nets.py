"""Blocks that count their calls where no list looks, and act on the count late; and blocks that only look like it."""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import importlib
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import explorer
from explorer.record.graph import ModelRef

FIRST_CALL = 24
"""Calls without an effect: step 9 bare, step 5 recomputed."""

_CONTEXT = contextvars.ContextVar("calls", default=0)


class Descriptor:
    calls = 0

    def __get__(self, owner: object, kind: object = None) -> int:
        if owner is not None:
            self.calls += 1
        return self.calls


class Block(nn.Module):
    described = Descriptor()

    def __init__(self, count: Callable[[Any], int]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(_scaled(x, self.count(self))).relu()


def _scaled(x: Tensor, calls: int) -> Tensor:
    return x * (1.5 if calls > FIRST_CALL else 1.0)


def _package() -> Any:
    """A package that lies where pip installs them."""
    if "hidden_manager" not in sys.modules:
        with tempfile.TemporaryDirectory() as folder:
            packages = Path(folder) / "site-packages"
            packages.mkdir()
            (packages / "hidden_manager.py").write_text("N = 0\ndef tick():\n    global N\n    N += 1\n    return N\n")
            sys.path.insert(0, str(packages))
            importlib.import_module("hidden_manager")
            sys.path.remove(str(packages))
    return sys.modules["hidden_manager"]


def replaced_forward(block: Block) -> None:
    calls = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return block.fc(_scaled(x, calls)).relu()

    block.forward = forward  # type: ignore[method-assign]


def installed_package(block: Block) -> None:
    package = _package()
    package.N = 0
    block.count = lambda _: package.tick()


def class_as_value(block: Block) -> None:
    block.kind = type("Kind", (), {"calls": 0})  # type: ignore[assignment]

    def count(one: Any) -> int:
        one.kind.calls += 1
        return int(one.kind.calls)

    block.count = count


def generator_function(block: Block) -> None:
    def schedule() -> Iterator[int]:
        calls = 0
        while True:
            yield (calls := calls + 1)

    block.schedule = schedule()  # type: ignore[assignment]
    block.count = lambda one: next(one.schedule)


def descriptor(block: Block) -> None:
    vars(Block)["described"].calls = 0
    block.count = lambda one: one.described


def context_variable(block: Block) -> None:
    _CONTEXT.set(0)

    def count(_: Any) -> int:
        _CONTEXT.set(_CONTEXT.get() + 1)
        return _CONTEXT.get()

    block.count = count


def shared_value(block: Block) -> None:
    block.shared = multiprocessing.Value("i", 0)  # type: ignore[assignment]

    def count(one: Any) -> int:
        one.shared.value += 1
        return int(one.shared.value)

    block.count = count


def in_a_file(block: Block) -> None:
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115
    file.write("0")

    def count(_: Any) -> int:
        file.seek(0)
        calls = int(file.read()) + 1
        file.seek(0)
        file.write(str(calls))
        return calls

    block.count = count


def environment(block: Block) -> None:
    os.environ["HIDDEN_NETS_CALLS"] = "0"

    def count(_: Any) -> int:
        os.environ["HIDDEN_NETS_CALLS"] = str(int(os.environ["HIDDEN_NETS_CALLS"]) + 1)
        return int(os.environ["HIDDEN_NETS_CALLS"])

    block.count = count


def among_many_objects(block: Block) -> None:
    block.memory = [[i] for i in range(100_001)]  # type: ignore[assignment]

    def count(one: Any) -> int:
        one.memory[-1][0] += 1
        return int(one.memory[-1][0]) - 100_000

    block.count = count


def history_of_maxima(block: Block) -> None:
    """Delayed scaling of float8: a window over sixteen calls, which equal inputs do not move."""
    package = _package()
    package.window = collections.deque(maxlen=16)

    def forward(x: Tensor) -> Tensor:
        package.window.append(x.abs().max().item())
        return block.fc(x * (1.0 + max(package.window))).relu()

    block.forward = forward  # type: ignore[method-assign]


def behind_a_child(block: Block) -> None:
    installed_package(block)
    block.forward = lambda x: _scaled(block.fc(x), block.count(block)).relu()  # type: ignore[method-assign]


class Member(enum.Enum):
    ONE = 1


def attribute_of_an_enum(block: Block) -> None:
    block.member = Member.ONE  # type: ignore[assignment]
    Member.ONE.calls = 0  # type: ignore[attr-defined]

    def count(one: Any) -> int:
        one.member.calls += 1
        return int(one.member.calls)

    block.count = count


def length_of_an_unjudged_log(block: Block) -> None:
    """Two runs of the baseline differ in the names, so the log is not judged."""
    block.log = []  # type: ignore[assignment]

    def count(one: Any) -> int:
        one.log.append(str(uuid.uuid4()))
        return len(one.log)

    block.count = count


def under_gradients_alone(block: Block) -> None:
    installed_package(block)
    tick = block.count
    block.count = lambda one: tick(one) if torch.is_grad_enabled() else 0


HIDDEN = (replaced_forward, installed_package, class_as_value, generator_function, descriptor, context_variable,
          shared_value, in_a_file, environment, among_many_objects, attribute_of_an_enum, length_of_an_unjudged_log,
          behind_a_child, under_gradients_alone, history_of_maxima)  # fmt: skip


def nothing(block: Block) -> None:
    block.count = lambda _: 0


def dropout_and_norm(block: Block) -> None:
    nothing(block)
    block.fc = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))  # type: ignore[assignment]


def timers_and_logs(block: Block) -> None:
    def count(one: Any) -> int:
        one.seconds = time.perf_counter()
        logging.getLogger("hidden_nets").debug("called")
        one.log.append(one.seconds)
        return 0

    block.log = []  # type: ignore[assignment]
    block.count = count


def memo(block: Block) -> None:
    cached = functools.lru_cache(lambda width: float(width))
    held: collections.OrderedDict[int, float] = collections.OrderedDict()
    block.count = lambda one: int(cached(4) * 0 + held.setdefault(4, 0.0))


def guarded(block: Block) -> None:
    """Right under a policy: a recompute does not count."""
    package = _package()
    package.N = 0
    block.count = lambda _: 0 if explorer.is_recomputing() else package.tick() and 0


def guarded_count(block: Block) -> None:
    installed_package(block)
    tick = block.count
    block.count = lambda one: _package().N if explorer.is_recomputing() else tick(one)


def guarded_by_graph_task(block: Block) -> None:
    """Code that torch alone guards: a recompute runs inside backward."""
    installed_package(block)
    tick = block.count
    block.count = lambda one: tick(one) if torch._C._current_graph_task_id() == -1 else _package().N


def guarded_by_stack(block: Block) -> None:
    """Code that looks for torch's functions on the stack."""
    installed_package(block)
    tick = block.count

    def count(one: Any) -> int:
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name in ("recompute_fn", "unpack_hook") and "checkpoint" in frame.f_code.co_filename:
                return int(_package().N)
            frame = frame.f_back
        return tick(one)

    block.count = count


def latest_maximum(block: Block) -> None:
    """Remembers the last call alone, which a recompute repeats."""
    package = _package()
    package.latest = 1.0

    def forward(x: Tensor) -> Tensor:
        factor, package.latest = package.latest, x.abs().max().item()
        return block.fc(x * (factor if torch.is_grad_enabled() else 1.0)).relu()

    block.forward = forward  # type: ignore[method-assign]


def refuses_large_inputs(block: Block) -> None:
    """Perturbed inputs raise: the probe then repeats the block's own."""

    def forward(x: Tensor) -> Tensor:
        assert x.abs().max().item() < 16.0, "no such input in training"
        return block.fc(x).relu()

    block.forward = forward  # type: ignore[method-assign]


def counted_without_effect(block: Block) -> None:
    installed_package(block)
    tick = block.count
    block.count = lambda one: tick(one) and 0


def behind_the_last_saved_tensor(block: Block) -> None:
    """With early stop no recompute gets to the counter."""
    installed_package(block)
    block.forward = lambda x: _scaled(block.fc(x).relu(), block.count(block))  # type: ignore[method-assign]


def saves_nothing(block: Block) -> None:
    """Autograd saves no tensor, so torch never recomputes the block."""
    installed_package(block)
    block.forward = lambda x: _scaled(x, block.count(block))  # type: ignore[method-assign]


def without_backward(block: Block) -> None:
    """No gradient comes back, so torch never recomputes the block."""
    installed_package(block)
    block.forward = lambda x: block.fc(_scaled(x, block.count(block))).relu().detach()  # type: ignore[method-assign]


def hook_in_backward(block: Block) -> None:
    """Backward runs once, with a recompute or without."""
    installed_package(block)

    def forward(x: Tensor) -> Tensor:
        y = block.fc(x).relu()
        if y.requires_grad:
            y.register_hook(lambda gradient: _scaled(gradient, block.count(block)))
        return y

    block.forward = forward  # type: ignore[method-assign]


HARMLESS = (nothing, dropout_and_norm, timers_and_logs, memo, guarded, guarded_count, counted_without_effect,
            guarded_by_graph_task, guarded_by_stack,
            behind_the_last_saved_tensor, saves_nothing, without_backward, hook_in_backward)  # fmt: skip


def every_eighth_call(block: Block) -> None:
    """The step after the probe is no eighth call."""
    installed_package(block)
    tick = block.count
    block.count = lambda one: 0 if tick(one) % 8 else FIRST_CALL + 1


def restarted_by_each_step(block: Block) -> None:
    """Two calls in a step have no effect; more calls than training makes would have one."""
    installed_package(block)
    block.register_module("restarts", None)


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if any("restarts" in block._modules for block in self):
            _package().N = 0
        return super().forward(x)


def net(kind: str, n: int = 3, at: int = 1) -> tuple[nn.Module, Tensor]:
    blocks = [Block(lambda _: 0) for _ in range(n)]
    globals()[kind](blocks[at])
    return Net(*blocks), torch.randn(8, 4)


def ref(kind: str) -> ModelRef:
    return ModelRef(target=f"{__file__}:net", arguments={"kind": kind})
