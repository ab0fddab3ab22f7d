"""The clock charges a step, a RunSpec's or a user's: by phase, by block, by operator, and for a checkpoint alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.engine.bench import bench as bench_module
from explorer.engine.bench.bench import (
    FEW,
    MANY,
    N_MODULES,
    N_ROUNDS,
    Bench,
    CheckpointCost,
    OperatorTimes,
    Readings,
    bench_of,
    read_cost,
)
from explorer.engine.bench.step import prepare
from explorer.engine.bench.user_step import announced
from explorer.engine.device.device import CpuDevice
from explorer.engine.state.global_state import preserve_global_state
from explorer.record import ModelRef, Policy, RunSpec, Unit
from explorer.record.measurement import Samples
from tests.engine.tiny_nets import ref
from tests.zoo import gpt_pair

MLP = RunSpec(model=ModelRef(target="sample_models/mlp.py"))


class Ticking:
    """A clock that advances by one millisecond a reading: makes times exact."""

    name: Literal["process CPU time"] = "process CPU time"

    def __init__(self) -> None:
        self.now = 0
        self.n_settled = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def settle(self) -> None:
        self.n_settled += 1

    def between_ms(self, first: Any, last: Any) -> float:
        return float(last - first)


def ticking(spec: RunSpec) -> Bench:
    bench = bench_of(prepare(spec), CpuDevice())
    return Bench(bench.model, bench.step, Ticking(), forwards=bench.forwards)


def of_user(model: nn.Module, step: Callable[[], object]) -> Bench:
    return Bench(model, announced(model, step), Ticking())


def test_phases_of_a_step_add_up() -> None:
    with preserve_global_state():
        bench = ticking(RunSpec(model=ref("chain"), n_accumulation=2))
        assert bench.time() == {"forward": 2, "backward": 2, "optimizer": 1, "step": 5}
        assert bench.clock.n_settled == 2  # type: ignore[attr-defined]
        assert bench.time(step=bench.forwards) == {"forward": 2, "between": 2, "step": 4}


POLICIES = (
    Policy.recompute(["1", "2"]),
    Policy.recompute(["1", "2"], use_reentrant=True),
    Policy(units=(Unit(blocks=("1", "2")),)),
)


@pytest.mark.parametrize("policy", POLICIES, ids=["non-reentrant", "reentrant", "segment"])
def test_a_block_that_runs_again_is_charged_with_its_ancestors(policy: Policy) -> None:
    with preserve_global_state():
        bench = ticking(RunSpec(model=ref("chain"), policy=policy))
        bench.take()
        steps, times = bench.time_blocks(policy)
    again = {fqn for fqn, rerun in times if rerun}
    assert {"", "1", "2", "1.0", "2.0"} <= again <= {"", "1", "2", "1.0", "1.1", "2.0", "2.1"}
    assert times["", True] == times["1", True] + times["2", True]
    assert times["1", True] > times["1.0", True]
    assert steps["step"] > times["", False] > sum(times[fqn, False] for fqn in "0123")


def test_a_users_step_is_charged_by_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def step() -> None:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        bench.clock.mark()  # its optimizer

    def rerun() -> None:
        y = torch.utils.checkpoint.checkpoint(model, torch.ones(1, 2), use_reentrant=False)
        y.square().sum().backward()

    bench = of_user(model, step)
    assert bench.time() == {"forward": 2, "backward": 2, "between": 6, "step": 10}
    assert not model._forward_hooks and not model._forward_pre_hooks
    phases: list[str] = []
    announced(model, rerun)(phases.append)
    assert phases == ["between", "forward", "between", *["backward"] * 3, "between"], "a forward inside backward"


def test_each_operator_is_charged_to_every_block_that_is_running_and_backward_to_none() -> None:
    bench = ticking(MLP)
    times = bench.time_operators()
    linears = [fqn for fqn, module in bench.model.named_modules() if isinstance(module, nn.Linear)]
    assert linears
    for fqn in linears:
        # One mark lies between the two of an operator: each took a millisecond.
        assert times[fqn].ms == {"aten.t.default": 1.0, "aten.addmm.default": 1.0} and times[fqn].n_calls == 2
    below = [fqn for fqn, module in bench.model.named_modules() if not list(module.children())]
    whole = times[""]
    assert whole.ms["aten.addmm.default"] == len(linears)
    assert whole.n_calls == sum(whole.ms.values()) >= sum(times[fqn].n_calls for fqn in below if fqn in times)
    assert not [op for op in whole.ms if "backward" in op]
    # A linear layer saves its input, and its weight where that input needs a gradient.
    assert [times[fqn].n_saved for fqn in linears] == [1, *[2] * (len(linears) - 1)]
    assert whole.n_saved >= sum(times[fqn].n_saved for fqn in linears)


def test_of_a_users_step_neither_what_is_around_the_model_counts_nor_its_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        for _ in range(3):
            model(torch.ones(2, 4).exp()).sin().sum().backward()
        optimizer.step()

    times = of_user(model, step).time_operators()
    assert times["0"].ms == {"aten.t.default": 3.0, "aten.addmm.default": 3.0}
    assert times["1"].ms == {"aten.gelu.default": 3.0}
    assert times[""].ms == times["0"].ms | times["1"].ms and times[""].n_calls == 9
    assert [times[fqn].n_saved for fqn in ("0", "1", "")] == [3, 3, 6], "the input of the model needs no gradient"
    assert (times["2"].n_calls, times["2"].n_saved) == (0, 0), "watched, and nothing ran there"


def test_every_forward_is_dispatched_and_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dispatch(TorchDispatchMode):
        """In place of torch's own."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    operators: list[list[str]] = []

    def contexts(ops: list[Any]) -> tuple[Dispatch, None]:
        assert ops == [], "nothing is kept"
        operators.append([])
        return Dispatch(), None

    bench = ticking(RunSpec(model=MLP.model, n_accumulation=2))
    monkeypatch.setattr(torch.Tensor, "backward", None)  # forwards alone run
    assert bench.time_dispatched() > 0, "torch's own"
    monkeypatch.setattr(bench_module, "create_selective_checkpoint_contexts", contexts)
    assert bench.time_dispatched() > 0
    assert len(operators) == 2, "one forward a microbatch"
    for of_forward in operators:
        assert "aten.addmm.default" in of_forward and not [op for op in of_forward if "backward" in op]
    n_seen = [len(of_forward) for of_forward in operators]
    monkeypatch.undo()
    bench.take()
    assert [len(of_forward) for of_forward in operators] == n_seen, "the dispatch has ended"


def test_readings_become_samples_and_none_become_nothing() -> None:
    (cost,) = (block for block in gpt_pair()[0].blocks if block.fqn == "head")
    run = replace(gpt_pair()[0], times=None, blocks=(replace(cost, forward=Samples()),))
    assert Readings().added_to(run, "process CPU time") == run
    readings = Readings(
        steps=[{"step": 3.0, "forward": 1.0, "backward": 2.0}, {"step": 5.0, "forward": 2.0, "backward": 3.0}],
        blocks=[{("head", False): 1.0, ("head", True): 0.5}, {("head", False): 2.0}],
        checkpoint=CheckpointCost(checkpoint_ms=0.25, close_checkpoint_ms=0.125, saved_tensor_ms=0.5),
        operators={"head": OperatorTimes(ms={"aten.mm.default": 1.0}, n_calls=2, n_saved=3)},
    )
    timed = readings.added_to(run, "process CPU time")
    times, block = timed.times, timed.by_fqn["head"]
    assert (times.checkpoint_ms, times.close_checkpoint_ms, times.saved_tensor_ms) == (0.25, 0.125, 0.5)
    assert (times.step.ms, times.forward.ms, times.optimizer.ms) == ((3.0, 5.0), (1.0, 2.0), ())
    assert (block.forward.ms, block.recompute.ms) == ((1.0, 2.0), (0.5,))
    assert (block.operator_ms, block.n_operators, block.n_saved) == ({"aten.mm.default": 1.0}, 2, 3)
    assert times.kept_operator_ms is None, "no forward was dispatched"


@pytest.mark.parametrize(
    ("dispatched", "expected"),
    [([(14.0, 10.0), (99.0, 11.0), (15.0, 12.0)], 2 * 4.0 / 8), ([(1.0, 10.0)], 0), ([], None)],
)
def test_a_kept_operator_costs_the_extra_time_of_dispatched_forwards(
    dispatched: list[tuple[float, float]], expected: float | None
) -> None:
    """In forward and rerun; a slow minute counts once."""
    readings = Readings(dispatched=dispatched)
    assert readings.kept_operator_ms is None, "operators were not counted"
    readings.operators = {"": OperatorTimes(n_calls=8)}
    assert readings.kept_operator_ms == expected


class Planned(Ticking):
    """A clock by which a step takes the planned time; every module and every sweep in it takes a millisecond."""

    def __init__(self, steps: list[float]) -> None:
        super().__init__()
        self.steps = iter(steps)

    def between_ms(self, first: Any, last: Any) -> float:
        return next(self.steps) if last - first > 1 else 1.0


@pytest.mark.parametrize(("swept", "few", "many", "expected"), [
    (3.0 + FEW * 0.1, 1.0 + FEW * 0.1, 1.0 + MANY * 0.1, (3.0, 1.0, 0.1)),
    (2.0, 1.0, 0.5, (2.0, 1.0, 0.0)),  # nothing is negative
    (-1.0, -1.0, -1.0, (0.0, 0.0, 0.0)),
])  # fmt: skip
def test_a_checkpoint_costs_the_median_of_what_is_left_over(
    swept: float, few: float, many: float, expected: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading is a kept step and a recomputed one: less the modules' forward, the difference is the call's cost."""
    readings = (call for call in (few, many, swept) for _ in range(N_ROUNDS))
    steps = [10.0 + extra for call in readings for extra in (0.0, N_MODULES * (call + 1.0))]
    steps[1] = 1e6  # a slow minute counts once
    position = torch.get_rng_state()
    monkeypatch.setattr("explorer.engine.bench.bench.SWEPT_BYTES", 1)  # the clock does not look
    assert read_cost(torch.device("cpu"), Planned(steps)) == pytest.approx(expected)
    assert torch.equal(torch.get_rng_state(), position)
