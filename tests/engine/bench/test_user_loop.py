"""Steps of a user's loop: recorded with their borders, repeated under policies, restored, and described."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import explorer
from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.bench.user_step import N_TIMED, UserSteps
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.policy.apply import apply_policy
from explorer.errors import BadInput
from explorer.plan.planners.planner import Planner
from explorer.record import Measurement, ModelRef, Policy
from tests.zoo import sample


def net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 16))


def recording_of(model: nn.Module) -> LoopRecording:
    return LoopRecording(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "train.py")


def test_borders_are_those_of_model_backward_and_optimizer() -> None:
    model = net()
    step = recording_of(model)
    with step:
        for _ in range(2):
            model(torch.ones(8, 16)).sum().backward()
        step.optimizers[0].step()
    run = step.measurement
    phases = [span.phase for span in run.phases]
    assert [phase for phase in phases if phase != "between"] == ["forward", "backward"] * 2 + ["optimizer"]
    assert run.spec.optimizer == "sgd" and run.spec.n_accumulation == 2 and run.failure is None
    assert run.graph is not None and [block.fqn for block in run.graph.blocks] == ["", "0", "0.0", "0.1", "1"]
    assert run.forward_flops == 2 * 2 * (2 * 8 * 16 * 16)


def test_an_exception_passes_and_the_record_stands() -> None:
    model = net()
    step = recording_of(model)
    with pytest.raises(ValueError, match="in the loop"), step:
        model(torch.ones(8, 16))
        raise ValueError("in the loop")
    failure = step.measurement.failure
    assert failure is not None and "in the loop" in failure.sentence
    assert step.measurement.step_peak_bytes is None and step.measurement.by_fqn["0"].n_forward == 1


def test_a_second_instrument_is_refused_while_autocast_and_policy_of_the_first_are_recorded() -> None:
    model = net()
    first = recording_of(model)
    with apply_policy(model, Policy.recompute(["0"])), first:
        with pytest.raises(BadInput), recording_of(model):
            pass
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(8, 16)).float().sum()
        loss.backward()
    run = first.measurement
    assert run.spec.policy.units[0].blocks == ("0",) and run.spec.autocast == "bfloat16"
    assert (run.by_fqn["0"].n_forward, run.by_fqn["0"].n_recompute, run.by_fqn["1"].n_recompute) == (1, 1, 0)


def loop() -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(64, 16)).square().sum().backward()
        optimizer.step()

    return model, step


def test_everything_is_as_found_after_recorded_and_timed_steps() -> None:
    model, step = loop()
    step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    position = torch.get_rng_state()
    with UserSteps(model, step, "train.py") as steps:
        graph = steps.graph()
        assert [block.fqn for block in graph.blocks] == ["", "0", "0.0", "0.1", "1"]
        kept, recomputed = steps.recorded(Policy()), steps.recorded(Policy.recompute(["0"]))
        assert steps.n_steps == 5, "the step of the graph ends before its backward"
        assert (kept.by_fqn["0"].n_recompute, recomputed.by_fqn["0"].n_recompute) == (0, 1)
        timed = steps.timed(kept)
        assert timed.times is not None and len(timed.times.step.ms) == N_TIMED
        assert len(timed.by_fqn["0"].forward.ms) == N_TIMED
        assert [len(times.step.ms) for times in steps.in_turns([Policy(), Policy.recompute(["0"])])] == [N_TIMED] * 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), position)


def test_a_refusal_of_memory_is_no_error_and_everything_is_as_found() -> None:
    model, step = loop()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def refused() -> None:
        step()
        raise MemoryError

    with UserSteps(model, refused, "train.py") as steps:
        assert steps.recorded(Policy()) is None and steps.in_turns([Policy()]) == []
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_batch_each_time_and_a_model_with_a_policy_are_refused() -> None:
    model, step = loop()
    rows: Any = iter(range(1, 9))
    with (
        UserSteps(model, lambda: model(torch.ones(next(rows), 16)).sum().backward(), "train.py") as steps,
        pytest.raises(BadInput, match="in the first step of train.py and .* in a later one"),
    ):
        steps.recorded(Policy())
    with apply_policy(model, Policy.recompute(["0"])), pytest.raises(BadInput, match="carries a policy already"):
        UserSteps(model, step, "train.py")


REFS = [sample("gpt", n_layers=3, width=32, n_heads=2, length=32, batch=8), ModelRef(target="sample_models/unet.py")]


def recorded(ref: ModelRef, policy: Policy | None = None, n_forwards: int = 1) -> Measurement:
    gc.collect()  # a model that nobody holds any more is held memory all the same
    loaded = load(ref)
    handle = explorer.apply_policy(loaded.model, policy or Policy())
    with explorer.record_step(loaded.model) as run:
        for _ in range(n_forwards):
            loaded.loss(loaded.output()).backward()
    handle.undo()
    return run.measurement


@pytest.mark.parametrize("ref", REFS, ids=["gpt", "unet"])
def test_blocks_spine_and_repeats_are_those_of_a_described_model(ref: ModelRef) -> None:
    recorded_graph, described = recorded(ref).graph, describe(ref)
    assert recorded_graph.fingerprint == described.fingerprint
    for name in ("chain", "repeats", "n_parameters"):
        assert getattr(recorded_graph, name) == getattr(described, name), name
    for block in recorded_graph.blocks:
        same = described.by_fqn[block.fqn]
        for name in ("kind", "n_calls", "forward_flops", "output_bytes", "repeat_of", "own_parameters"):
            assert getattr(block, name) == getattr(same, name), (block.fqn, name)
        assert block.uses_rng == same.uses_rng and block.running_statistics == same.running_statistics
        assert block.saved_bytes == pytest.approx(same.saved_bytes, rel=0.01, abs=1024)


def test_calls_are_those_of_one_forward_where_the_step_has_several() -> None:
    one, two = recorded(REFS[0]).graph, recorded(REFS[0], n_forwards=2).graph
    for block, same in zip(two.blocks, one.blocks):
        assert (block.n_calls, block.forward_flops) == (same.n_calls, same.forward_flops)
    assert two.edges == one.edges


def test_a_policy_in_force_is_in_the_record_and_plans_start_from_everything_kept() -> None:
    policy = Policy.recompute(["blocks.0", "blocks.1"])
    plain, policed = recorded(REFS[0]), recorded(REFS[0], policy)
    assert policed.spec.policy == policy and not plain.spec.policy.units
    kept, put_together = (Planner(run, run.graph) for run in (plain, policed))
    assert put_together.keep_all_bytes == pytest.approx(kept.keep_all_bytes, rel=0.01)
    assert put_together.floor().step_peak_bytes == pytest.approx(kept.floor().step_peak_bytes, rel=0.01)
    assert kept.floor().step_peak_bytes < kept.keep_all_bytes
