"""A training's first step makes state that all later steps hold: every figure of it is about the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import explorer
from explorer.own_loop.heal import ladder
from explorer.own_loop.record_step import RecordedRun
from explorer.plan.card.cards import parse_card
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.memory.next_step import new_bytes, next_step
from explorer.plan.planners.confirm import refusal
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.sizes import mib
from explorer.record import KEEP_ALL
from explorer.record.allocations import ROLES
from explorer.record.base import column
from explorer.record.failure import Failure

WIDTH, BATCH = 128, 256


class Loop:
    """A training of four blocks, one method a step. `optimizer` is made by the subclass' `make`."""

    given: bool = True
    """Whether the recording is given the optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
        self.model = nn.Sequential(*blocks)
        self.x = torch.randn(BATCH, WIDTH)
        self.optimizer: Any = self.make()

    def make(self) -> Any:
        return torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def recorded(self) -> RecordedRun:
        with explorer.record_step(self.model, self.optimizer if self.given else None) as run:
            self.step()
        return run


class Adam(Loop):
    """State of two copies of the weights."""


class Unknown(Loop):
    """The recording does not know the optimizer."""

    given = False


class Momentum(Loop):
    def make(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)


class OneByOne(Loop):
    def make(self) -> Any:
        return torch.optim.RMSprop(self.model.parameters(), foreach=False, momentum=0.5)


class ClearsAtTheEnd(Loop):
    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class ClearsBeforeBackward(Loop):
    """Gradients of the step before are alive during forward."""

    def make(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), 1e-3)

    def step(self) -> None:
        loss = self.model(self.x[:8]).square().mean()
        self.model.zero_grad()
        loss.backward()
        self.optimizer.step()


class ZeroesInPlace(Loop):
    """Gradients are never freed."""

    def make(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), 1e-3)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.x).square().mean().backward()
        self.optimizer.step()


class Averaged(Loop):
    """An average of the weights that the first step makes, after the optimizer."""

    average: nn.Module | None = None

    def step(self) -> None:
        super().step()
        if self.average is None:
            self.average = copy.deepcopy(self.model)
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.model.parameters()):
                slow.lerp_(fast, 0.1)


class HoldsOutput(Loop):
    """A variable of the loop holds the output until the next one is there."""

    out: torch.Tensor | None = None

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.out = self.model(self.x)
        self.out.square().mean().backward()
        self.optimizer.step()


class Scaled(Loop):
    scaler: Any = None

    def step(self) -> None:
        self.scaler = self.scaler or torch.amp.GradScaler("cpu")
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(self.x).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class OwnOptimizer(Loop):
    """An optimizer of the loop's own, that torch's hooks do not hear, keeps state in a list."""

    def make(self) -> Any:
        parameters = list(self.model.parameters())

        class Signed(torch.optim.Optimizer):
            def __init__(self) -> None:
                super().__init__(parameters, {})
                self.moments: list[torch.Tensor] = []

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                self.moments = self.moments or [torch.zeros_like(p) for p in parameters]
                for moment, p in zip(self.moments, parameters):
                    moment.lerp_(p.grad, 0.1)
                    p.sub_(moment.sign(), alpha=1e-4)

        return Signed()


class Accumulates(Loop):
    def step(self) -> None:
        self.optimizer.zero_grad()
        for part in self.x.chunk(2):
            self.model(part).square().mean().backward()
        self.optimizer.step()


LOOPS = [
    Adam, Unknown, Momentum, OneByOne, ClearsAtTheEnd, ClearsBeforeBackward, ZeroesInPlace, Averaged, HoldsOutput,
    Scaled, OwnOptimizer, Accumulates,
]  # fmt: skip


@pytest.mark.parametrize("kind", LOOPS)
def test_the_next_step_peaks_where_its_first_step_said(kind: Callable[[], Loop]) -> None:
    loop = kind()
    first, second, third = (loop.recorded() for _ in range(3))
    truth = second.peak_bytes
    assert third.peak_bytes == truth > first.peak_bytes, "the case has no state that is born in the first step"
    predicted = next_step(first.measurement)
    assert predicted.step_peak_bytes == truth
    assert predicted.allocations is not None and second.measurement.allocations is not None
    assert predicted.allocations.held_bytes[0] == second.measurement.allocations.held_bytes[0]
    assert Forecaster(first.measurement, first.measurement.graph).forecast(KEEP_ALL).step_peak_bytes == truth
    assert next_step(predicted) is predicted
    assert next_step(third.measurement) is third.measurement and not new_bytes(third.measurement)


@pytest.mark.parametrize("share", [0.9, 0.75])
@pytest.mark.parametrize("kind", [Adam, Unknown, Averaged, ZeroesInPlace])
def test_a_plan_from_the_first_step_is_kept_by_the_steps_that_follow(kind: Callable[[], Loop], share: float) -> None:
    loop = kind()
    loop.x = torch.randn(8 * BATCH, WIDTH)
    first = loop.recorded()
    budget = int(share * (first.forecast(KEEP_ALL).step_peak_bytes or 0))
    plan = first.plan(f"{budget} B")
    explorer.apply_policy(loop.model, plan.policy)
    peaks = [loop.recorded().peak_bytes for _ in range(2)]
    assert plan.policy.units and plan.step_peak_bytes <= budget
    assert peaks == pytest.approx([plan.step_peak_bytes] * 2, rel=2e-3)
    assert first.forecast(plan.policy).step_peak_bytes == plan.step_peak_bytes


def test_text_and_readers_speak_of_the_next_step() -> None:
    loop = Adam()
    first, second = loop.recorded(), loop.recorded()
    this, following = mib(first.peak_bytes), mib(second.peak_bytes)
    assert f"peak {this}, the next step {following} (predicted)" in str(first).splitlines()[0]
    assert f"the next at {following} (predicted)" in first.why()[0] and "optimizer state (4.0 MiB)" in first.why()[0]
    assert first.why()[1:] == second.why(), "the rest is about the next step"
    assert "next step" not in str(second)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_card_holds_what_the_two_first_steps_show(kind: Callable[[], Loop]) -> None:
    loop = kind()
    first, second = loop.recorded(), loop.recorded()
    expected = memory_on(parse_card("24GiB"), second.measurement, first.measurement)
    card = first.on_card("24GiB")
    assert card.requested_bytes == expected.requested_bytes
    assert card.requested_bytes - card.workspace_bytes == second.peak_bytes
    assert card.reserved_bytes == expected.reserved_bytes


def test_a_workspace_of_cublas_stays_and_a_card_takes_its_own() -> None:
    """An entry as a GPU's first product makes it, as large as a weight that the step frees."""
    run = Adam().recorded().measurement
    log = run.allocations
    assert log is not None
    new = {"n_bytes": 2**25, "born": 2, "died": log.n_ticks + 1, "role": ROLES.index("cuBLAS workspace")}
    longer = {name: column([*getattr(log, name), new.get(name, 0)]) for name in (*new, "block", "op", "dtype", "line")}
    on_gpu = replace(run, allocations=replace(log, **longer))
    following = next_step(on_gpu).allocations
    assert following is not None and (following.born[len(log.born)], following.n_bytes[len(log.born)]) == (0, 2**25)
    assert next_step(on_gpu).step_peak_bytes == (next_step(run).step_peak_bytes or 0) + 2**25
    for played in ((next_step(run), next_step(on_gpu)), (run, on_gpu)):
        without, with_it = (memory_on(parse_card("24GiB"), step).requested_bytes for step in played)
        assert without == with_it


def test_a_refusal_and_the_ladder_of_heal_take_the_next_step() -> None:
    loop = Adam()
    loop.x = torch.randn(8 * BATCH, WIDTH)
    first, second = loop.recorded().measurement, loop.recorded().measurement
    failure = Failure(kind="out of memory", sentence="Refused.", free_bytes=0)
    log = second.allocations
    assert log is not None
    forward = next(span for span in second.phases if span.phase == "backward").first_tick
    died = column(min(tick, forward + 1) for tick in log.died)
    kept = [entry for entry, born in enumerate(log.born) if born <= forward]
    refused = replace(
        second,
        failure=failure,
        allocations=replace(
            log,
            n_ticks=forward,
            **{
                name: column(values[i] for i in kept)
                for name, values in dict(
                    n_bytes=log.n_bytes, born=log.born, died=died, role=log.role, block=log.block, op=log.op
                ).items()
            },
        ),
    )
    by_first, by_second = refusal(refused, first)[1], refusal(refused, second)[1]
    assert by_first.partition(" With ")[2] == by_second.partition(" With ")[2] != ""
    assert f", and {mib(second.step_peak_bytes or 0)} with the state that it made" in by_first
    assert [policy for policy, _ in ladder(first)] == [policy for policy, _ in ladder(second)]
