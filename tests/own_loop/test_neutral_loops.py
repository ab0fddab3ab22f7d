"""An instrument changes no bit of a training: weights, optimizer state and generators after each of ten steps.

Each loop has something that a switch of an instrument could change: compiled code whose kernels round otherwise, fused
attention, foreach and fused optimizers, autocast, a generator, deterministic settings, higher-order operators.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import explorer
from explorer.errors import BadInput

N_STEPS, RECORDED = 10, 3
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Loop:
    """Steps of a small transformer; `compile` and `optimizer` are the loop's own switches."""

    def __init__(self, folder: Path, backend: Any = None, way: str = "model", **optimizer: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model: Any = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **optimizer)
        self.called: Callable[[Tensor], Tensor] = self.model
        self.step: Callable[[Tensor], None] = self._step
        self.is_compiled = backend is not None
        if backend is not None:
            if way == "model":
                self.called = torch.compile(self.model, backend=backend)
            elif way == "in place":
                self.model.compile(backend=backend)
            elif way == "blocks":
                for block in self.model:
                    block.compile(backend=backend)
            else:
                self.step = torch.compile(self._step, backend=backend)

    def _step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.called(x).softmax(-1).square().mean().backward()
        self.optimizer.step()

    def hash(self) -> str:
        """Weights, optimizer state and generators."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [t for t in (*self.model.state_dict().values(), *states) if isinstance(t, Tensor)]
        digest = hashlib.sha256(repr(random.getstate()).encode())
        for tensor in (*tensors, torch.get_rng_state()):
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class Conditional(Loop):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.called = lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.model(x),))


class Checkpointed(Loop):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.called = lambda x: self.model[2](checkpoint(self.model[:2], x, use_reentrant=False))


class Teacher(Loop):
    """A frozen net in eval mode under no_grad: torch's fused path of a transformer layer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        teacher = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True).eval().requires_grad_(False)
        self.teacher = teacher

        def called(x: Tensor) -> Tensor:
            with torch.no_grad():
                aim = teacher(x)
            return self.model(x) + aim.mean(-1, keepdim=True)  # type: ignore[no-any-return]

        self.called = called


class Autocast(Loop):
    def _step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.called(x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()


class Deterministic(Loop):
    def _step(self, x: Tensor) -> None:
        torch.use_deterministic_algorithms(True)
        super()._step(x + random.random())
        torch.use_deterministic_algorithms(False)


class Accumulating(Loop):
    def _step(self, x: Tensor) -> None:
        for part in x.chunk(2):
            self.called(part).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def rounds_otherwise(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A compiler whose kernels compute other bits, as a fusing compiler does."""

    def run(*args: Any) -> Any:
        outputs = graph.forward(*args)
        return tuple(out * (1 + 2**-20) if out.is_floating_point() else out for out in outputs)

    return run


LOOPS: dict[str, Callable[[Path], Loop]] = {
    "plain": Loop,
    "foreach": lambda folder: Loop(folder, foreach=True),
    "fused": lambda folder: Loop(folder, fused=True),
    "compiled, eager": lambda folder: Loop(folder, "eager"),
    "compiled, aot_eager": lambda folder: Loop(folder, "aot_eager"),
    "compiled, other bits": lambda folder: Loop(folder, rounds_otherwise),
    "compiled in place": lambda folder: Loop(folder, rounds_otherwise, "in place"),
    "compiled blocks": lambda folder: Loop(folder, rounds_otherwise, "blocks"),
    "compiled step": lambda folder: Loop(folder, rounds_otherwise, "step"),
    "cond": Conditional,
    "checkpoint": Checkpointed,
    "teacher": Teacher,
    "autocast": Autocast,
    "deterministic": Deterministic,
    "accumulating": Accumulating,
}


def record(loop: Loop, steps: Iterator[None], at: int) -> None:
    for number, _ in enumerate(steps, 1):
        with explorer.record_step(loop.model, loop.optimizer) if number == at else nullcontext() as run:
            loop.step(batch(number))
        if run is not None:
            assert run.peak_bytes and run.measurement.ran_compiled == loop.is_compiled == ("ran compiled" in str(run))
        if run is not None and loop.is_compiled:
            # What cannot be known of compiled code is not said of its kernels, blocks and reruns.
            assert not any(
                words in str(run) for words in ("inside kernels", "of a kernel", "ran again for", "ward in ")
            )
            with pytest.raises(BadInput, match=r"from a compiled step, whose blocks are not seen\. Set [A-Z_]+=1\.$"):
                run.plan("60%")


def watch(loop: Loop, steps: Iterator[None], folder: Path) -> None:
    with explorer.watch(loop.model, loop.optimizer, at=RECORDED, on_oom=folder / "oom.explorer"):
        for number, _ in enumerate(steps, 1):
            loop.step(batch(number))


def batch(number: int) -> Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(number))


def hashes(make: Callable[[Path], Loop], folder: Path, run: Callable[[Loop, Iterator[None]], None]) -> list[str]:
    torch._dynamo.reset()
    loop, found = make(folder), list[str]()

    def steps() -> Iterator[None]:
        for number in range(N_STEPS):
            if number:
                found.append(loop.hash())
            yield
        found.append(loop.hash())

    run(loop, steps())
    assert len(found) == N_STEPS
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOPS)
def test_no_instrument_changes_a_bit_of_a_training(name: str, tmp_path: Path) -> None:
    make = LOOPS[name]
    bare = hashes(make, tmp_path, lambda loop, steps: record(loop, steps, at=0))
    assert len(set(bare)) == N_STEPS
    assert hashes(make, tmp_path, lambda loop, steps: record(loop, steps, at=1)) == bare
    assert hashes(make, tmp_path, lambda loop, steps: record(loop, steps, at=RECORDED)) == bare
    assert hashes(make, tmp_path, lambda loop, steps: watch(loop, steps, tmp_path)) == bare
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_bytes_after_compiled_code_are_of_no_block_that_had_begun(checkpointed: bool) -> None:
    """The encoder runs as written and has begun when compiled code runs inside of it. The head comes later."""
    torch._dynamo.reset()
    encoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    encoder[1].compile(backend="eager")
    model, plain = nn.Sequential(encoder, nn.Linear(8, 4096)), encoder.forward
    if checkpointed:
        encoder.forward = lambda x: checkpoint(plain, x, use_reentrant=False)  # type: ignore[method-assign, assignment]
    with explorer.record_step(model) as run:
        model(torch.randn(64, 8, requires_grad=True)).square().mean().backward()
    log, phases = run.measurement.allocations, [span.phase for span in run.measurement.phases]
    assert run.measurement.ran_compiled and log is not None
    assert {log.blocks[block] for block, n in zip(log.block, log.n_bytes) if n == 64 * 4096 * 4} == {""}
    assert "recompute" not in phases and "0" not in {word.strip(",.:") for word in str(run).split()}
