"""Models that carry something on from step to step, one kind of memory each, written wrongly and rightly.

Each factory takes `right`: True asks `is_recomputing()` before it moves anything, as a model under checkpointing
should. None of these memories is read by the gradient of the first step unless the docstring says so.
"""

from __future__ import annotations

import itertools
import queue
import random
from array import array
from collections import Counter, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from explorer import is_recomputing
from explorer.record.graph import ModelRef
from tests.engine import tiny_nets
from tests.engine.tiny_nets import bump
from tests.engine.trap_nets import WIDTH, Built, Wrapped, built, mean_square

N_CALLS = 0
"""A global of the file, moved by `FileGlobal`."""


def ref(factory: str, **arguments: Any) -> ModelRef:
    return ModelRef(target=f"{__file__}:{factory}", arguments=arguments)


class Memory(nn.Module):
    """Passes x through; `moves` changes what is remembered, twice a step where it is written wrongly."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right
        self.begin()

    def forward(self, x: Tensor) -> Tensor:
        if not (self.right and is_recomputing()):
            self.moves(x.detach())
        return self.used(x)

    def begin(self) -> None:
        """Sets what is remembered."""

    def moves(self, x: Tensor) -> None:
        raise NotImplementedError

    def used(self, x: Tensor) -> Tensor:
        return x


class MomentumEncoder(Memory):
    """A frozen copy of a trained layer that follows it in forward."""

    def begin(self) -> None:
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key.requires_grad_(False)

    def moves(self, x: Tensor) -> None:
        with torch.no_grad():
            self.key.weight.mul_(0.9).add_(self.query.weight, alpha=0.1)

    def used(self, x: Tensor) -> Tensor:
        return self.query(x)


class AverageByData(MomentumEncoder):
    """The same through `.data`, which no version counter sees."""

    def moves(self, x: Tensor) -> None:
        self.key.weight.data.mul_(0.9).add_(self.query.weight.data, alpha=0.1)


class TrainedMoved(Memory):
    """A trained parameter that forward decays."""

    def begin(self) -> None:
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def moves(self, x: Tensor) -> None:
        self.scale.data.mul_(0.9)

    def used(self, x: Tensor) -> Tensor:
        return x + self.scale * 0


class StepRead(Memory):
    """A counter whose parity the *next* step reads."""

    def begin(self) -> None:
        self.step = 0

    def moves(self, x: Tensor) -> None:
        self.step += 1

    def used(self, x: Tensor) -> Tensor:
        return x if self.step < 3 else x * 2


class FlipFlop(Memory):
    """After two steps it stands where it stood, moved once or twice a step."""

    def begin(self) -> None:
        self.flag = False

    def moves(self, x: Tensor) -> None:
        self.flag = not self.flag


class NumpyMean(Memory):
    def begin(self) -> None:
        self.mean = np.zeros(WIDTH)

    def moves(self, x: Tensor) -> None:
        self.mean = 0.9 * self.mean + x.mean(0).numpy()


class FloatMean(Memory):
    def begin(self) -> None:
        self.mean = 0.0

    def moves(self, x: Tensor) -> None:
        self.mean = 0.9 * self.mean + float(x.mean())


class Queue(Memory):
    """Keeps the last 128: a change far inside."""

    def begin(self) -> None:
        self.queue: deque[float] = deque(range(128), maxlen=128)

    def moves(self, x: Tensor) -> None:
        self.queue.append(float(x.sum()))


class Counted(Memory):
    def begin(self) -> None:
        self.seen: Counter[str] = Counter()
        self.numbers = itertools.count()

    def moves(self, x: Tensor) -> None:
        self.seen["calls"] += 1
        next(self.numbers)


class OnTheClass(Memory):
    n_calls = 0

    def moves(self, x: Tensor) -> None:
        type(self).n_calls += 1


class FileGlobal(Memory):
    def moves(self, x: Tensor) -> None:
        global N_CALLS  # noqa: PLW0603
        N_CALLS += 1


class ClassElsewhere(Memory):
    """Nobody makes an instance of that class; the code names it."""

    def moves(self, x: Tensor) -> None:
        tiny_nets.Registry.n_calls += 1


class GlobalElsewhere(Memory):
    """A function of another file moves a global of that file."""

    def moves(self, x: Tensor) -> None:
        bump()


class Slotted:
    __slots__ = ("n_calls",)

    def __init__(self) -> None:
        self.n_calls = 0


class InSlots(Memory):
    def begin(self) -> None:
        self.deep: dict[str, Any] = {"a": [{"b": ({"c": [{"d": Slotted()}]},)}]}

    def moves(self, x: Tensor) -> None:
        self.deep["a"][0]["b"][0]["c"][0]["d"].n_calls += 1


class Unregistered(Memory):
    """A BatchNorm in a plain list: neither its statistics nor its parameters are the model's."""

    def begin(self) -> None:
        self.hidden = [nn.BatchNorm1d(WIDTH)]

    def moves(self, x: Tensor) -> None:
        with torch.no_grad():
            self.hidden[0](x)


class InClosure(Memory):
    def begin(self) -> None:
        n_calls = 0

        def count() -> None:
            nonlocal n_calls
            n_calls += 1

        self.count = count

    def moves(self, x: Tensor) -> None:
        self.count()


class Draws(Memory):
    """Generators of three libraries, in a list: drawn from, and the number is not used."""

    def begin(self) -> None:
        self.sources = [np.random.default_rng(0), random.Random(0), torch.Generator().manual_seed(0)]

    def moves(self, x: Tensor) -> None:
        self.sources[0].random()
        self.sources[1].random()
        torch.rand(1, generator=self.sources[2])


class InDefaults(Memory):
    def moves(self, x: Tensor, seen: list[int] = []) -> None:  # noqa: B006  the trap itself
        seen.append(1)


def file_counter() -> None:
    file_counter.n_calls = getattr(file_counter, "n_calls", 0) + 1  # type: ignore[attr-defined]


class OnAFunction(Memory):
    def moves(self, x: Tensor) -> None:
        file_counter()


class OnAParameter(Memory):
    def begin(self) -> None:
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.scale.n_calls = 0

    def moves(self, x: Tensor) -> None:
        self.scale.n_calls += 1


class History(list[float]):
    n_calls = 0


class OnAList(Memory):
    def begin(self) -> None:
        self.history = History()

    def moves(self, x: Tensor) -> None:
        self.history.n_calls += 1


class Iterated(Memory):
    def begin(self) -> None:
        self.schedule = iter([0.1] * 50)

    def moves(self, x: Tensor) -> None:
        next(self.schedule)


class InAQueue(Memory):
    def begin(self) -> None:
        self.jobs: queue.Queue[float] = queue.Queue()
        self.counts = array("q", [0])

    def moves(self, x: Tensor) -> None:
        self.counts[0] += 1


class SwitchesMode(Memory):
    """Turns off its dropout after three forwards."""

    def begin(self) -> None:
        self.idle = nn.Dropout(0.5)
        self.left = iter(range(3))

    def moves(self, x: Tensor) -> None:
        self.idle.train(next(self.left, None) is not None)


class KeepsHooks(Memory):
    """Registers a hook in every forward."""

    def moves(self, x: Tensor) -> None:
        self.register_forward_hook(_nothing)


def _nothing(*_: Any) -> None:
    return None


KINDS: dict[str, type[Memory]] = {
    kind.__name__: kind
    for kind in (MomentumEncoder, AverageByData, TrainedMoved, StepRead, FlipFlop, NumpyMean, FloatMean, Queue, Counted,
                 OnTheClass, FileGlobal, ClassElsewhere, GlobalElsewhere, InSlots, Unregistered, InClosure, Draws,
                 InDefaults, OnAFunction, OnAParameter, OnAList, Iterated, InAQueue, SwitchesMode, KeepsHooks)
}  # fmt: skip


def memory(kind: str, *, right: bool) -> Built:
    """Linear, a block that remembers, Linear: the block is `1`."""
    return built([Wrapped(KINDS[kind](right=right))])


def all_memories(*, right: bool) -> Built:
    """A block of every kind; `right`: none counts a recompute."""
    return built([Wrapped(kind(right=right)) for kind in KINDS.values()])


class NoiseBeforeAll(nn.Module):
    """Noise on the input: no parameter's gradient reads it, the input's own does."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right
        self.factor = 1.0
        self.exit = nn.Linear(WIDTH, 1)
        self.noisy = _Scaled(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.noisy(x))


class _Scaled(nn.Module):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        again = is_recomputing() and not self.owner[0].right
        return x * torch.full_like(x, 2.0 if again else 1.0)


def input_gradient(*, right: bool) -> Built:
    """The batch wants a gradient of its own, as a second model before this one would."""
    inputs = torch.randn(8, WIDTH, requires_grad=True)
    return NoiseBeforeAll(right=right), (inputs, torch.randn(8, 1)), mean_square


def hooked_counter(*, right: bool) -> Built:
    """A forward hook, on a child, whose closure counts; and a hook on a tensor that clips."""
    model, batch, loss = built([Wrapped(nn.GELU())])
    calls: list[int] = []

    def counts(*_: Any) -> None:
        if not (right and is_recomputing()):
            calls.append(1)

    model[1].trap.register_forward_hook(counts)
    return model, batch, loss


def counts_backwards() -> Built:
    """A hook on a parameter counts the backwards, under a policy or none."""
    model, batch, loss = built([Wrapped(nn.GELU())])
    model.n_backwards = 0

    def count(_: Tensor) -> None:
        model.n_backwards += 1

    next(model.parameters()).register_hook(count)
    return model, batch, loss


def clipped(*, right: bool) -> Built:
    """Gradients clipped by hooks on the tensors: the judged model has to have them too."""
    model, batch, loss = built([Wrapped(nn.GELU())])
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return model, batch, loss


def optimizer_in_backward(*, right: bool) -> Built:
    """Steps as soon as a gradient is there, and leaves none behind. Wrong: its block is another one at recompute."""
    model, batch, loss = built([Wrapped(_Wrong() if not right else nn.GELU())])
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(tensor: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            tensor.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    return model, batch, loss


class _Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * (2 if is_recomputing() else 1))


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x


def held_by_hook(*, right: bool) -> Built:
    """A hook of one module that writes into another, which it holds: in a deep copy it would hold the original's."""
    model, batch, loss = built([Wrapped(Seen())])
    trap = model[1].trap

    def writes(*_: Any) -> None:
        trap.seen.add_(1)

    model[0].register_forward_hook(writes)
    return model, batch, loss


def another_each_time() -> Built:
    """Weights from the operating system's randomness: no seed sets them back."""
    model, batch, loss = built([Wrapped(nn.GELU())])
    with torch.no_grad():
        model[0].bias.fill_(random.SystemRandom().random())
    return model, batch, loss


def clipped_another_each_time() -> Built:
    """Hooks on tensors of a model that cannot be built twice: a copy of it takes unclipped steps."""
    model, batch, loss = another_each_time()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return model, batch, loss


class WritesIntoBatch(nn.Module):
    """Counts in a tensor that came with the batch."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right
        self.noisy, self.exit = _Counts(self), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, n_seen: Tensor) -> Tensor:
        return self.exit(self.noisy(x, n_seen))


class _Counts(nn.Module):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, n_seen: Tensor) -> Tensor:
        if not (self.owner[0].right and is_recomputing()):
            n_seen.data.add_(1)  # torch refuses the open way: the input of a checkpoint was changed
        return torch.tanh(self.linear(x))


def writes_into_batch(*, right: bool) -> Built:
    batch = (torch.randn(8, WIDTH), torch.zeros((), dtype=torch.int64))
    return WritesIntoBatch(right=right), (batch, torch.randn(8, 1)), mean_square
