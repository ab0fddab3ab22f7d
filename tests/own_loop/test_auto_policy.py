"""A budget in, a policy out, and nothing of the caller's loop is another than before."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import explorer
from explorer.engine.bench.host_stand_in import host_stand_in
from explorer.engine.device.memory_limit import process_memory_limit
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.errors import BadInput, ModelFailed
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.planners.planner import Planner
from explorer.record.card import Card
from explorer.record.plan import AutoPlan, Report, silent
from tests.own_loop import test_record_step
from tests.own_loop.test_record_step import BATCH, WIDTH


class Net(nn.Module):
    """Dropout, running statistics, a counter and a list: all that a forward may move."""

    def __init__(self, n_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(n_blocks)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.n_forwards, self.means = 0, [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_forwards += 1
        for block in self.blocks:
            x = block(x)
        self.means.append(float(x.detach().mean()))
        return self.norm(x)


class Loop(test_record_step.Loop):
    """A moving average beside the model."""

    def __init__(self, n_blocks: int = 4, n_rows: int = 2 * BATCH) -> None:
        super().__init__(lambda: Net(n_blocks), n_rows)
        self.average = nn.Linear(WIDTH, WIDTH)

    def step(self) -> None:
        super().step()
        with torch.no_grad():
            self.average.weight.lerp_(self.model.blocks[0][0].weight[:WIDTH], 0.1)


class Scaled(Loop):
    """Autocast and a gradient scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(self.model(self.x), self.y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Bare(Loop):
    """No optimizer: gradients add up from step to step."""

    def step(self) -> None:
        nn.functional.mse_loss(self.model(self.x), self.y).backward()


def carried(loop: Loop) -> list[Any]:
    """All that training carries on."""
    plain = [loop.model.n_forwards, *loop.model.means, loop.schedule.last_epoch, loop.optimizer.param_groups[0]["lr"]]
    scaler = getattr(loop, "scaler", None)
    plain.append(None if scaler is None else sorted(scaler.state_dict().items()))
    return [*test_record_step.carried(loop), loop.average.weight.detach().clone(), *plain]


def differing(left: list[Any], right: list[Any]) -> list[int]:
    """Places of what is not equal, bit by bit."""
    assert len(left) == len(right)
    pairs = enumerate(zip(left, right))
    return [i for i, (a, b) in pairs if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n_before"), [(Loop, 2), (Scaled, 0), (Bare, 2)])
def test_everything_is_as_found_and_a_step_of_the_loop_keeps_the_budget(kind: type[Loop], n_before: int) -> None:
    loop, untouched = kind(), kind()
    torch.manual_seed(1)
    for _ in range(n_before):
        loop.step()
    before = carried(loop)
    plan = explorer.auto_policy(loop.model, loop.step, "85%")
    assert not differing(carried(loop), before)
    budget = plan.plan.budget_bytes
    assert budget is not None and plan.policy.units and plan.kept and not plan.missed
    assert plan.measured_peak_bytes <= budget < plan.front[0].step_peak_bytes
    assert plan.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert plan.measured_time_ratio is not None
    assert plan.n_steps == 18, "as the README says"
    assert plan.certificate.gap <= 5e-3
    torch.manual_seed(1)
    for _ in range(n_before):
        untouched.step()
    explorer.apply_policy(loop.model, plan.policy)
    for one in (loop, untouched):
        torch.manual_seed(2)
        one.step()
    policed, plain = carried(loop), carried(untouched)
    assert not differing(policed, plain), "training went on differently"
    del before, policed, plain, untouched, one
    gc.collect()
    with explorer.record_step(loop.model, loop.optimizer) as run:
        loop.step()
    assert run.peak_bytes <= budget * 1.001


def test_what_cannot_be_planned_says_so() -> None:
    loop, stranger = Loop(), nn.Linear(2, 2)
    before = carried(loop)
    with pytest.raises(BadInput, match="below 1 B: the least that can be reached is"):
        explorer.auto_policy(loop.model, loop.step, 1)
    with pytest.raises(BadInput, match="without a backward"):
        explorer.auto_policy(loop.model, lambda: loop.model(loop.x))
    with pytest.raises(BadInput, match="did not call the model"):
        explorer.auto_policy(stranger, loop.step)
    assert not differing(carried(loop), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, by torch.func.jvp
def test_a_recompute_that_does_other_work_is_refused_in_a_sentence() -> None:
    """Torch's own checkpoint raises under forward-mode differentiation: the recompute has no tangents."""
    model, x = Net(), torch.randn(BATCH, WIDTH)
    model.norm = nn.LayerNorm(WIDTH)

    def step() -> None:
        out, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        (out.square().mean() + tangent.square().mean()).backward()

    with pytest.raises(ModelFailed, match=r"did other work than forward: forward saved .* Under torch\.func"):
        explorer.auto_policy(model, step, budget="90%")
    step()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_error_of_the_step_passes_and_everything_is_as_found() -> None:
    loop = Loop()
    loop.step()
    before = carried(loop)

    def step() -> None:
        loop.step()
        if loop.model.n_forwards > 5:
            raise KeyError("of the loop's own")

    with pytest.raises(KeyError):
        explorer.auto_policy(loop.model, step)
    assert not differing(carried(loop), before)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * self.down(torch.tanh(self.up(x)))


class Refusing(nn.Module):
    """Blocks that look like a segment in the first step, and that the model does not let be one."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(6))
        self.case, self.n_forwards = case, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_forwards += 1
        for i, block in enumerate(self.blocks):
            warm = self.case == "another value" and self.n_forwards > 1
            x = block(x, 1 - i / 100 if warm else 1.0)
            if self.case == "read in between":
                x.register_hook(lambda gradient: gradient)
        return x


@pytest.mark.parametrize("case", ["another value", "read in between"])
def test_a_segment_that_the_model_refuses_is_struck_and_the_step_planned_again(case: str) -> None:
    model, x = Refusing(case), torch.randn(256, 16)

    def step() -> None:
        model(x).square().mean().backward()

    # Bytes that earlier tests of this process hold count as input: the share is one of what the step adds,
    # and so near to what blocks alone reach that a plan with segments is cheaper whatever the clock says.
    with explorer.record_step(model) as run:
        step()
    model.zero_grad(set_to_none=True)
    log = run.measurement.allocations
    assert log is not None
    held, peak = int(log.held_bytes[0]), int(max(log.held_bytes))
    model.n_forwards = 0
    plan = explorer.auto_policy(model, step, held + int(0.61 * (peak - held))).require()
    assert plan.refused_segments[0] == ("blocks.0", "blocks.1")
    assert f"refuses {' and '.join(plan.refused_segments[0])} as one segment" in str(plan)
    for policy in (plan.policy, *(other.policy for other in plan.front)):
        assert not any(set(pair) <= set(unit.blocks) for unit in policy.units for pair in plan.refused_segments)
    assert model.n_forwards == 0 and all(parameter.grad is None for parameter in model.parameters())
    with explorer.apply_policy(model, plan.policy):
        step(), step()


class Waves(nn.Module):
    """Little arithmetic, much to keep: three times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).abs().clamp(max=4.0)


def planned_below_a_limit(report: Report) -> tuple[AutoPlan, bool]:
    """Runs in a process of its own: elsewhere, what earlier work gave back would fit beside the limit."""
    for module in ("highspy", "torch._dynamo"):  # what is imported below the limit would count against it
        importlib.import_module(module)
    model = nn.Sequential(*(Waves() for _ in range(4)))
    x = torch.ones(9 * 2**20)  # of 36 MiB: from 32 MiB on the allocator gives memory back at once

    def step() -> None:
        model(x).mean().backward()

    with process_memory_limit(420 * 2**20):
        plan = explorer.auto_policy(model, step, "320MiB")
    return plan, all(parameter.grad is None and parameter.item() == 1 for parameter in model.parameters())


def test_where_keeping_everything_does_not_fit_it_goes_down_the_ladder() -> None:
    answer = call_in_subprocess(planned_below_a_limit, report=silent, what="planned below a limit")
    assert answer is not None, "the system ended it for lack of memory"
    plan, untouched = answer
    assert plan.refused == ("everything kept",)
    assert plan.policy.units and plan.kept and plan.measured_time_ratio is None
    assert plan.front[0].step_peak_bytes > 450 * 2**20
    assert untouched


def test_a_card_as_budget_bounds_what_its_allocator_reserves() -> None:
    loop = Loop(n_blocks=8, n_rows=2048)  # large beside the 20 MiB of a segment, and beside what other tests left alive
    loop.step()
    with explorer.record_step(loop.model, loop.optimizer) as run:
        loop.step()
    whole = run.on_card("24GiB")
    card = Card(name="small", total_bytes=whole.allocated_bytes - 1, taken_bytes=0, cublas=whole.card.cublas)
    assert memory_on(card, run.measurement).refused is not None
    plan = explorer.auto_policy(loop.model, loop.step, budget=card).require()
    assert plan.policy.units and plan.plan.bounded == "reserved" and plan.card is not None
    assert plan.card.refused is None and plan.card.reserved_bytes <= card.total_bytes
    figures = f"small, torch {plan.card.card.torch}: {plan.card.requested_bytes:,} requested"
    assert plan.card.card.torch and "bounded: reserved bytes" in str(plan) and figures in str(plan)
    undone = replace(plan, card=memory_on(card, run.measurement))
    assert not undone.kept
    with pytest.raises(BadInput, match="misses its card, small"):
        undone.require()


def test_blocks_may_wait_on_the_host_and_a_real_step_holds_what_is_predicted() -> None:
    """At this bandwidth offload is cheaper than any recompute; a second record, without the planner, has the bytes."""
    loop = Loop()
    before = carried(loop)
    plan = explorer.auto_policy(loop.model, loop.step, "85%", offload=True, host_bandwidth=1e15)
    assert not differing(carried(loop), before)
    actions = {unit.action for unit in plan.policy.units}
    assert actions == {"offload"} and plan.kept
    assert plan.measured_peak_bytes == plan.predicted_peak_bytes
    assert f"offloaded: {plan.plan.host_peak_bytes:,} bytes on the host, predicted" in str(plan)
    assert "0 blocks recomputed." in str(plan)
    assert {unit.action for unit in explorer.auto_policy(loop.model, loop.step, "85%").policy.units} == {"recompute"}
    loop.step()
    recording = explorer.record_step(loop.model, loop.optimizer)
    with explorer.apply_policy(loop.model, plan.policy), host_stand_in(), recording as run:
        loop.step()
    assert run.peak_bytes == plan.measured_peak_bytes
    assert run.measurement.peaks.offloaded_peak_bytes == plan.plan.host_peak_bytes


def test_offload_is_not_planned_where_the_step_does_not_say_what_is_saved() -> None:
    loop = Loop()

    def twice() -> None:
        loss = loop.model(loop.x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(BadInput, match="if one backward reads it"):
        explorer.auto_policy(loop.model, twice, "85%", offload=True)
    with explorer.record_step(loop.model, loop.optimizer) as run:
        loop.step()
    graph = run.measurement.graph
    assert graph is not None
    with pytest.raises(BadInput, match=r"your own loop shows it to explorer\.auto_policy\(\.\.\., offload=True"):
        Planner(run.measurement, graph).with_offload(1e9)
