"""Operators of a forward are timed one by one, block by block, on the step's own clock."""

from __future__ import annotations

import torch
from torch import nn

from explorer.engine.bench.step import prepare
from explorer.engine.bench.timing import live_operator_times, operator_times
from explorer.record import ModelRef, RunSpec


class CountingClock:
    """Every mark one millisecond behind the last."""

    name = "process CPU time"

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def settle(self) -> None:
        """Nothing is under way."""

    def between_ms(self, first: int, last: int) -> float:
        return float(last - first)


def test_each_operator_is_charged_to_every_block_that_is_running_and_backward_to_none() -> None:
    trainee = prepare(RunSpec(model=ModelRef(target="sample_models/mlp.py")))
    times = operator_times(trainee, CountingClock())
    linears = [fqn for fqn, module in trainee.model.named_modules() if isinstance(module, nn.Linear)]
    assert linears
    for fqn in linears:
        # One mark lies between the two of an operator: each took a millisecond.
        assert times[fqn].ms == {"aten.t.default": 1.0, "aten.addmm.default": 1.0} and times[fqn].n_calls == 2
    below = [fqn for fqn, module in trainee.model.named_modules() if not list(module.children())]
    whole = times[""]
    assert whole.ms["aten.addmm.default"] == len(linears)
    assert whole.n_calls == sum(whole.ms.values()) >= sum(times[fqn].n_calls for fqn in below if fqn in times)
    assert not [op for op in whole.ms if "backward" in op]
    # A linear layer saves its input, and its weight where that input needs a gradient.
    assert [times[fqn].n_saved for fqn in linears] == [1, *[2] * (len(linears) - 1)]
    assert whole.n_saved >= sum(times[fqn].n_saved for fqn in linears)


def test_of_somebodys_own_step_neither_what_is_around_the_model_counts_nor_its_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        rows = torch.ones(2, 4).exp()
        model(rows).sin().sum().backward()
        optimizer.step()

    times = live_operator_times(model, step, CountingClock())
    assert times["0"].ms == {"aten.t.default": 1.0, "aten.addmm.default": 1.0}
    assert times["1"].ms == {"aten.gelu.default": 1.0}
    assert times[""].ms == times["0"].ms | times["1"].ms and times[""].n_calls == 3
    assert (times["0"].n_saved, times["1"].n_saved, times[""].n_saved) == (1, 1, 2), "its input needs no gradient"


def test_every_microbatch_of_somebodys_own_step_counts_and_so_does_a_block_that_does_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())

    def step() -> None:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()

    times = live_operator_times(model, step, CountingClock())
    assert times["0"].n_calls == 3 * 2 and times["0"].n_saved == 3
    assert (times["1"].n_calls, times["1"].n_saved) == (0, 0), "looked at, and nothing was there"
