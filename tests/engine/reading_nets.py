"""Nets whose blocks read state at their entry: state that moves between forward and recompute, and state that does not
matter. No value moves twice, so two steps are equal and a later one is not.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from explorer.record.graph import ModelRef

STEPS = {"n": 0}
PHASE = contextvars.ContextVar("phase", default=0)
LATE, HARMLESS = {}, {}  # type: ignore[var-annotated]


def late(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a net with a late read, by the name that the finding has to contain."""

    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        LATE[build.__name__] = (build, name)
        return build

    return register


def harmless(build: Callable[[], Any]) -> Callable[[], Any]:
    HARMLESS[build.__name__] = build
    return build


class Block(nn.Module):
    linear: Any
    state: Any

    def __init__(self, factor: Callable[[Any], float], state: Any = None) -> None:
        super().__init__()
        self.linear, self.factor, self.state = nn.Linear(4, 4), factor, state

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).tanh() * self.factor(self)


class Net(nn.Module):
    """Three blocks between what happens before and after them in each forward."""

    blocks: Any
    around: Any

    def __init__(self, block: Callable[[], Block], after: Callable[[Net], object] = lambda net: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.after, self.around = after, contextlib.nullcontext

    def forward(self, x: Tensor) -> Any:
        with self.around():
            for block in self.blocks:
                x = block(x)
        self.after(self)
        return x


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def counting_loss(output: Tensor, target: Tensor) -> Tensor:
    STEPS["n"] += 1
    return plain_loss(output, target)


def _count(state: Any) -> None:
    state["step"] += 1


def _of_config() -> Callable[[], Block]:
    config = {"step": 0, "logged": 0}
    return lambda: Block(lambda block: 1.0 + block.state["step"] // 10, config)


@late("state.step")
def root_counts() -> Any:
    return Net(_of_config(), lambda net: _count(net.blocks[0].state)), plain_loss


@late("STEPS.n")
def loss_counts() -> Any:
    STEPS["n"] = 0
    return Net(lambda: Block(lambda block: 2.0 if STEPS["n"] >= 100 else 1.0)), counting_loss


@late("state.step")
def backward_hook_counts() -> Any:
    net = Net(_of_config())
    net.register_full_backward_pre_hook(lambda module, gradient: _count(net.blocks[0].state))
    return net, plain_loss


class Schedule:
    def __init__(self) -> None:
        self.step = 0

    def factor(self) -> float:
        return 1.0 + max(0, self.step - 50)


@late("state.step")
def object_with_a_method() -> Any:
    schedule = Schedule()

    def count(net: Net) -> None:
        schedule.step += 1

    return Net(lambda: Block(lambda block: block.state.factor(), schedule), count), plain_loss


@late("temperature")
def buffer_is_written() -> Any:
    def block() -> Block:
        block = Block(lambda block: float(block.temperature >= 9) + 1.0)
        block.register_buffer("temperature", torch.zeros(()))
        return block

    return Net(block, lambda net: [block.temperature.add_(1) for block in net.blocks]), plain_loss


@late("training")
def mode_is_switched() -> Any:
    def switch(net: Net) -> None:
        for block in net.blocks:
            block.training = not block.training

    return Net(lambda: Block(lambda block: 1.0), switch), plain_loss


@late("linear")
def weights_are_clipped() -> Any:
    def clip(net: Net) -> None:
        with torch.no_grad():
            net.blocks[0].linear.bias.clamp_(-9.0, 9.0)

    return Net(lambda: Block(lambda block: 1.0), clip), plain_loss


@late("default dtype")
def default_dtype_at_root() -> Any:
    @contextlib.contextmanager
    def around() -> Iterator[None]:
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    net = Net(lambda: Block(lambda block: 1.0))
    net.around = around
    return net, plain_loss


class Counted(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@late("modes")
def function_mode_at_root() -> Any:
    net = Net(lambda: Block(lambda block: 1.0))
    net.around = Counted
    return net, plain_loss


@late("flash attention")
def attention_backend_at_root() -> Any:
    net = Net(lambda: Block(lambda block: 1.0))
    net.around = lambda: sdpa_kernel(SDPBackend.MATH)
    return net, plain_loss


@contextlib.contextmanager
def _in_phase() -> Iterator[None]:
    token = PHASE.set(1)
    try:
        yield
    finally:
        PHASE.reset(token)


@late("context variable phase")
def context_variable_at_root() -> Any:
    net = Net(lambda: Block(lambda block: 1.0 + PHASE.get() // 10))
    net.around = _in_phase
    return net, plain_loss


FOLDER = tempfile.TemporaryDirectory()
"""Holds a package that lies where pip installs them."""


def package() -> Any:
    packages = Path(FOLDER.name) / "site-packages"
    if not packages.exists():
        packages.mkdir()
        text = "N = 0\ndef factor():\n    return 1.0 + N // 10\ndef count():\n    global N\n    N += 1\n"
        (packages / "late_package.py").write_text(text)
        sys.path.insert(0, str(packages))
        importlib.import_module("late_package")
        sys.path.remove(str(packages))
    return sys.modules["late_package"]


PACKAGE = package()


class BehindTheLastTensor(Block):
    """Early stop never reaches the count."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x * PACKAGE.factor()).tanh()
        PACKAGE.count()
        return y


@late("N")
def package_counts_behind_the_last_saved_tensor() -> Any:
    PACKAGE.N = 0
    return Net(lambda: BehindTheLastTensor(lambda block: 1.0)), plain_loss


@harmless
def unread_key_of_a_shared_config() -> Any:
    def log(net: Net) -> None:
        net.blocks[0].state["logged"] += 1

    return Net(_of_config(), log), plain_loss


@harmless
def counters_and_lists_for_a_log() -> Any:
    def factor(block: Any) -> float:
        block.seen.append(1)
        return 1.0

    def block() -> Block:
        block = Block(factor)
        vars(block).update(seen=[], n_calls=0)
        return block

    def log(net: Net) -> None:
        for block in net.blocks:
            block.n_calls += 1

    return Net(block, log), plain_loss


class KeepsItsOutput(Block):
    """Writes before it reads, as a context of the running layer does."""

    def forward(self, x: Tensor) -> Any:
        self.state["layer"] = self.factor(self)
        return self.linear(x).tanh() * self.state["layer"]


@harmless
def hook_that_only_collects() -> Any:
    """As transformers collects hidden states: in forward only, by a context variable."""
    net = Net(lambda: Block(lambda block: 1.0))

    def collect(module: nn.Module, inputs: object, output: Tensor) -> None:
        if PHASE.get() == 1:
            outputs.append(output.detach())

    outputs: list[Tensor] = []
    for block in net.blocks:
        block.linear.register_forward_hook(collect)
    net.around = _in_phase
    return net, plain_loss


@harmless
def written_before_it_is_read() -> Any:
    shared = {"layer": 0.0}
    numbers = iter(range(1, 9))

    def block() -> Block:
        number = float(next(numbers))
        return KeepsItsOutput(lambda block: number, shared)

    return Net(block), plain_loss


class Lazy(Block):
    """A table that the first call makes, and that grows with the input."""

    n_rows: Any

    def forward(self, x: Tensor) -> Any:
        if self.state is None or self.n_rows < len(x):
            self.n_rows, self.state = len(x), torch.ones(len(x), 1)
        return self.linear(x).tanh() * self.state[: len(x)]


@harmless
def lazy_table() -> Any:
    def block() -> Block:
        block = Lazy(lambda block: 1.0)
        block.n_rows = 0
        return block

    return Net(block), plain_loss


@harmless
def losses_in_a_new_list() -> Any:
    return Net(lambda: Block(lambda block: setattr(block, "state", [torch.ones(1)]) or 1.0)), plain_loss


@harmless
def norm_and_dropout() -> Any:
    def block() -> Block:
        block = Block(lambda block: 1.0)
        block.linear = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        return block

    return Net(block), plain_loss


@harmless
def nothing() -> Any:
    return Net(lambda: Block(lambda block: 1.0)), plain_loss


def net(kind: str) -> Any:
    build = LATE[kind][0] if kind in LATE else HARMLESS[kind]
    model, loss = build()
    return model, (torch.randn(8, 4), torch.randn(8, 4)), loss


def ref(kind: str) -> ModelRef:
    return ModelRef(target=f"{__file__}:net", arguments={"kind": kind})
