"""torch.compile beside a recorded step: the other steps run compiled, whatever is compiled, and the recorded one says
that it did not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import explorer

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


class Loop:
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


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("instrument", ["record_step", "at", "on_oom"])
@pytest.mark.parametrize("way", ["model", "wrapper", "fullgraph", "in place", "blocks", "whole step"])
def test_only_the_recorded_step_runs_as_written_and_it_says_so(way: str, instrument: str, tmp_path: Path) -> None:
    loop = Loop(way)
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
    assert loop.ran == set(range(1, N_STEPS + 1)) - recorded
    assert len(runs) == len(recorded)
    for run in runs:
        assert run.measurement.ran_as_written
        assert "torch.compile was off" in str(run)
        # The blocks were seen, and so was the memory.
        assert [cost.n_forward for cost in run.measurement.blocks if cost.fqn.endswith("blocks.1")] == [1]


def test_a_step_without_compiled_code_says_nothing_of_it() -> None:
    loop = Loop("eager")
    with explorer.record_step(loop.net, loop.optimizer) as run:
        loop.take()
    assert not run.measurement.ran_as_written and "torch.compile" not in str(run)
