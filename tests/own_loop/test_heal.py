"""`on_oom="heal"`: a refused batch runs again with more blocks recomputed, and no bit of the training differs.

A dispatch mode refuses memory at a chosen operator: every place of a step can be tried without a limit of the process.
The last test takes a real limit, and benchmarks/heal.py long runs under real limits.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import explorer
from explorer.engine.device.memory_limit import address_space_bytes
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.errors import BadInput
from explorer.own_loop.heal import Healed
from explorer.record.plan import Report, silent
from tests.own_loop.test_watch import nothing_stays, opened

__all__ = ["nothing_stays"]
Loop = Iterator[None]
Batches = Callable[[int], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Block(nn.Module):
    """Moves statistics and draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, 8)
        self.body = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Net(nn.Module):
    """The output is a dictionary with the loss, a view, or a plain tensor, as models of different libraries have it."""

    def __init__(self, kind: str = "plain", width: int = 32) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(8, 1 if kind == "view" else 4)
        self.n_calls = 0
        self.register_buffer("n_seen", torch.zeros(1))
        self.register_buffer("signs", torch.eye(2).to_sparse(), persistent=False)
        self.register_buffer("unmoved", torch.eye(2).to_sparse(), persistent=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.n_calls += 1
        scale = (1 + random.random() if self.kind == "python" else 1.0) * (1 + self.n_calls % 3)
        self.n_seen += len(x)
        scale *= float(self.signs.mul_(-1)._values()[0] * self.unmoved._values()[0])
        for block in self.blocks:
            x = block(x)
        out = self.head(x) * scale
        if labels is not None:
            return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}
        return out.squeeze(-1) if self.kind == "view" else out


def batch(i: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)


def plain(model: Net, optimizer: torch.optim.Optimizer, batch: Batches = batch) -> Loop:
    for i in count():
        x, y = batch(i)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield


def accumulating(model: Net, optimizer: torch.optim.Optimizer, batch: Batches = batch) -> Loop:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for i in count():
        for j in range(3):
            x, y = batch(3 * i + j)
            (nn.functional.cross_entropy(model(x), y) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(i % 2))
        schedule.step()
        yield


def with_autocast(model: Net, optimizer: torch.optim.Optimizer, batch: Batches = batch) -> Loop:
    for i in count():
        x, y = batch(i)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, labels=y)
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def regression(model: Net, optimizer: torch.optim.Optimizer, batch: Batches = batch) -> Loop:
    for i in count():
        x, _ = batch(i)
        found = model(x)
        noise = 0.1 * torch.randn(len(x))  # drawn between forward and backward: once, though both run again
        error = (found - x.sum(1) + noise).abs()  # in the user's frame: it holds the graph of a refused backward
        error.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def closure(model: Net, optimizer: torch.optim.Optimizer, batch: Batches = batch) -> Loop:
    for i in count():
        x, y = batch(i)

        def loss() -> Any:
            optimizer.zero_grad()
            value = nn.functional.cross_entropy(model(x), y)  # noqa: B023
            value.backward()
            return value

        optimizer.step(loss)
        yield


LOOPS: dict[str, tuple[Callable[..., Loop], str]] = {
    "plain": (plain, "python"),
    "accumulating": (accumulating, "plain"),
    "autocast": (with_autocast, "plain"),
    "regression": (regression, "view"),
    "closure": (closure, "plain"),
}


class Refusing(TorchDispatchMode):
    """Refuses memory once, at the operator of that number in a backward or outside of one."""

    def __init__(self, phase: str, number: int) -> None:
        super().__init__()
        self.at = phase, number
        self.n = dict.fromkeys(("forward", "backward"), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase = "forward" if torch._C._current_graph_task_id() < 0 else "backward"
        self.n[phase] += 1
        if (phase, self.n[phase]) == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


At = dict[int, tuple[str, int]]
"""By step: the phase and the number of the operator that is refused."""
REFUSED: At = {2: ("backward", 40), 3: ("forward", 30), 5: ("backward", 100)}


def trained(name: str, at: At | None) -> tuple[list[Tensor], list[Healed]]:
    """State after five steps, and what was healed; without refusals no watch. The first step is recorded."""
    loop, kind = LOOPS[name]
    torch.manual_seed(0)
    random.seed(0)
    model = Net(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    with explorer.watch(model, optimizer, at=1, on_oom="heal") if at else nullcontext() as watch:
        steps = loop(model, optimizer)
        for step in range(1, 6):
            with Refusing(*at[step]) if at and step in at else nullcontext():
                next(steps)
    state = [*model.state_dict().values(), torch.tensor(model.n_calls)]
    moments = [value for each in optimizer.state.values() for value in each.values()]
    state += [*moments, torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    return state, watch.healed if watch else []


@pytest.mark.parametrize("name", LOOPS)
def test_refusals_in_forward_and_backward_climb_the_ladder_and_change_no_bit(name: str) -> None:
    """benchmarks/heal.py refuses by a limit of memory, and a thousand steps long."""
    reference, _ = trained(name, None)
    state, healed = trained(name, REFUSED)
    assert all(map(torch.equal, state, reference)) and len(state) == len(reference) > 40
    assert {event.step: event.phase for event in healed} == {step: phase for step, (phase, _) in REFUSED.items()}
    assert len({event.policy for event in healed}) == len(healed) and all(event.policy.units for event in healed)
    assert any(event.flop_ratio is not None for event in healed)
    failure = opened(Path("healed.step3.explorer")).failure
    assert failure is not None and failure.hint.startswith("Healed: the ") and "FLOPs (predicted)" in failure.hint
    assert sorted(path.name for path in Path().glob("healed.*")) == [f"healed.step{n}.explorer" for n in REFUSED]


def refused_in(step: Callable[[Net, torch.optim.Optimizer], None]) -> str:
    """The notes of the error that leaves a second step whose memory is refused by the step itself."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(torch.OutOfMemoryError) as caught, explorer.watch(model, optimizer, on_oom="heal"):
        next(plain(model, optimizer))
        step(model, optimizer)
    assert opened(Path("oom.explorer")).failure is not None
    return " ".join(caught.value.__notes__)


class RefusedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def in_optimizer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model(batch(1)[0]).sum().backward()
    with Refusing("forward", 4):
        optimizer.step()


def in_backward_of_loss(model: Net, optimizer: torch.optim.Optimizer) -> None:
    RefusedGradient.apply(model(batch(1)[0])).sum().backward()


def inside(loss: Callable[[Net], Tensor], **options: Any) -> Callable[[Net, torch.optim.Optimizer], None]:
    """A step whose backward is refused in the model's last block."""

    def step(model: Net, optimizer: torch.optim.Optimizer) -> None:
        model.blocks[3].register_forward_hook(lambda _, args, out: RefusedGradient.apply(out))
        loss(model).backward(**options)

    return step


@pytest.mark.parametrize(("step", "reason"), [
    (in_optimizer, "outside of the model's forward and backward"),
    (in_backward_of_loss, "in the backward of the loss"),
    (inside(lambda net: net(batch(1)[0]).sum() + net(batch(2)[0]).sum()), "2 calls of the model"),
    (inside(lambda net: net(batch(1)[0]).sum() + net.head.weight.square().sum()), "a parameter outside"),
    (inside(lambda net: net(batch(1)[0].requires_grad_()).sum()), "input needs a gradient"),
    (inside(lambda net: net(batch(1)[0]).sum(), retain_graph=True), "keeps its graph"),
    (inside(lambda net: (out := net(*batch(1)))["loss"] + out["logits"].sum()), "two outputs"),
    (inside(lambda net: net(batch(1)[0]).sum()), "no plan with a lower peak is left"),
])  # fmt: skip
def test_what_cannot_be_undone_is_refused_in_a_sentence(step: Any, reason: str) -> None:
    notes = refused_in(step)
    assert f"Not healed: {reason}" in notes or reason in notes.partition("Not healed: ")[2], notes


def test_a_model_that_cannot_run_again_is_refused_before_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Net()
    explorer.apply_policy(model, explorer.Policy.recompute(["blocks.0"]))
    with pytest.raises(BadInput, match="carries a policy already and other ranks would not"):
        explorer.watch(model, on_oom="heal")
    assert "_call_impl" not in vars(model)


def test_copies_of_a_watched_model_run_without_the_healer_and_close_leaves_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    x, _ = batch(0)
    expected = model(x)
    with explorer.watch(model, on_oom="heal", at=9):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        with torch.no_grad():
            copies[0][0].weight.add_(1)
        assert torch.equal(model(x), expected) and torch.equal(copies[1](x), expected)
        assert not torch.equal(copies[0](x), expected)
    assert "_call_impl" not in vars(model) and torch.equal(model(x), expected)


class Slope(nn.Module):
    """Counts its forwards and takes a gradient inside, as a model of energies takes forces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.n_calls = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return torch.func.grad(lambda y: self.inner(y).square().sum())(x) * self.n_calls


@pytest.mark.parametrize("inside", [True, False])
def test_torch_func_in_a_model_or_around_it_is_left_alone(*, inside: bool) -> None:
    """It refuses the hooks on saved tensors by which a step could run again."""
    left = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Slope() if inside else nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with explorer.watch(model, optimizer, on_oom="heal") if watched else contextlib.nullcontext():
            for i in range(3):
                x, _ = batch(i)
                optimizer.zero_grad()
                scales = x if inside else torch.func.grad(lambda y, model=model: model(y).square().sum())(x)
                model(scales).sum().backward()
                optimizer.step()
        left.append([*model.parameters(), torch.get_rng_state()])
    assert all(map(torch.equal, *left))
    with pytest.raises(BadInput, match=r"calls torch\.func .* Use torch\.autograd\.grad"):
        explorer.auto_policy(model, lambda: torch.func.grad(lambda y: model(y).square().sum())(x))


def test_an_operation_that_spoils_a_saved_tensor_still_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    with explorer.watch(model, on_oom="heal", at=9):
        out = model(torch.randn(2, 4))
        out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def trained_under_a_limit(report: Report) -> tuple[int, list[bool]]:
    """Refusals that were healed, and which tensors are those of a training without a limit."""
    train = importlib.import_module("benchmarks.heal").train  # which imports this file
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        state, watch, _ = train("plain", 16, 10 * 2**20)
        reference, _, _ = train("plain", 16, None)
    return len(watch.healed), [torch.equal(one, other) for one, other in zip(state, reference, strict=True)]


@pytest.mark.slow
@pytest.mark.skipif(address_space_bytes() is None, reason="only Linux limits a process")
def test_a_training_under_a_real_limit_ends_with_the_weights_of_one_without() -> None:
    """In a process of its own: a limit does not count the holes that other tests left in the heap."""
    answer = call_in_subprocess(trained_under_a_limit, report=silent, what="a training under a limit")
    assert answer is not None, "the system ended it for lack of memory"
    n_healed, equal = answer
    assert n_healed >= 2 and len(equal) > 40 and all(equal)
