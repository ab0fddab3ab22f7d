"""Models that checkpoint themselves: found before a run and in one, named, and judged against themselves without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import explorer
from explorer.errors import BadInput
from explorer.plan.hazards.hazards import hazards
from explorer.plan.memory.reruns import in_words, self_checkpointing
from explorer.plan.planners.planner import Planner
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Policy
from explorer.record.plan import Forecast
from tests.engine.graphs import graph_of


class Helper(torch.autograd.Function):
    """guided-diffusion's: no_grad in forward, again with gradients in backward, and no thought of the generators."""

    @staticmethod
    def forward(ctx: Any, run: Any, n_inputs: int, *args: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.inputs, ctx.parameters = run, args[:n_inputs], args[n_inputs:]
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs = [one.detach().requires_grad_(True) for one in ctx.inputs]
        with torch.enable_grad():
            output = ctx.run(*[one.view_as(one) for one in inputs])
        results = torch.autograd.grad(output, [*inputs, *ctx.parameters], gradients, allow_unused=True)
        return (None, None, *results)


class Block(nn.Module):
    def __init__(self, how: str, p: float = 0.5) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, 16))
        self.how, self.use_checkpoint = how, how == "helper with a flag"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "torch":
            return checkpoint(self._body, x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.how == "torch without generators":
            return checkpoint(self._body, x, use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]
        if self.use_checkpoint or self.how == "helper":
            return Helper.apply(self._body, 1, x, *self.parameters())  # type: ignore[no-any-return, no-untyped-call]
        return self._body(x)

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def net(how: str, p: float = 0.5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(how, p), Block(how, p), nn.Linear(16, 1))


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
OWN = ["torch", "torch without generators", "helper with a flag", "helper"]


def step_of(model: nn.Module) -> Any:
    return lambda: model(X).square().mean().backward()


@pytest.mark.parametrize("how", OWN)
def test_they_are_named_before_any_run_and_counted_in_one(how: str) -> None:
    model = net(how)
    graph = graph_of(model, X)
    assert [block.fqn for block in graph.blocks if "checkpoints_itself" in block.traits] == ["1", "2"]
    (hazard,) = (one for one in hazards(graph, Policy.recompute(["1"])) if one.rule == "checkpoints-itself")
    assert hazard.blocks == ("1", "2") and "run a further time" in hazard.sentence
    with explorer.record_step(model) as run:
        step_of(model)()
    assert self_checkpointing(run.measurement) == {"1": 1.0, "2": 1.0}
    assert "ran again ×1, by the model itself" in repr(run)
    assert run.measurement.graph is not None
    assert "checkpoints_itself" in run.measurement.graph.by_fqn["1"].traits
    forecaster = Forecaster(run.measurement, graph)
    for fqn in ("", "1", "1.inner.1"):
        assert forecaster.forecast(Policy.recompute([fqn])) == Forecast(), "5,056 bytes and FLOPs would be missing"
    assert forecaster.forecast(Policy.recompute(["0"])).step_peak_bytes


def test_a_planner_leaves_them_and_what_is_around_them_alone() -> None:
    model = nn.Sequential(nn.Sequential(nn.Tanh(), Block("torch")), nn.Tanh(), nn.Linear(16, 1))
    with explorer.record_step(model) as run:
        step_of(model)()
    offered = Planner(run.measurement, graph_of(model, X)).candidates.units
    assert {fqn for candidate in offered for fqn in candidate.unit.blocks} == {"1", "2"}


def test_a_plain_model_and_a_policy_are_not_meant() -> None:
    model = net("")
    assert not any("checkpoints_itself" in block.traits for block in graph_of(model, X).blocks)
    text = repr(explorer.audit(model, step_of(model)))
    assert text.startswith("The model runs nothing again by itself.") and "use_checkpoint off" in text
    with explorer.apply_policy(model, Policy.recompute(["1"])), explorer.record_step(model) as run:
        step_of(model)()
    assert run.measurement.by_fqn["1"].n_recompute == 1 and not in_words(run.measurement)


def test_torchs_own_is_the_same_gradient() -> None:
    model = net("torch")
    audit = explorer.audit(model, step_of(model))
    assert audit.judged is not None and audit.judged.verdict == "bitwise equal" and audit.is_same
    assert not audit.other_draws and "the very random numbers" in repr(audit)


@pytest.mark.parametrize("how", ["torch without generators", "helper with a flag"])
def test_a_helper_that_forgets_the_generators_is_called_different(how: str) -> None:
    model = net(how)
    audit = explorer.audit(model, step_of(model))
    assert audit.judged is not None and audit.judged.verdict == "different" and audit.is_same is False
    assert set(audit.other_draws) == {"1.inner.2", "2.inner.2"}
    still = net(how, p=0.0)
    assert explorer.audit(still, step_of(still)).is_same


def test_without_a_switch_the_draws_alone_are_compared_and_that_is_said() -> None:
    model = net("helper")
    audit = explorer.audit(model, step_of(model))
    assert audit.judged is None and audit.is_same is False and audit.other_draws
    assert "no plain version could be built" in repr(audit)
    still = net("helper", p=0.0)
    assert explorer.audit(still, step_of(still)).is_same is None


def test_the_model_is_left_as_found() -> None:
    model = net("helper with a flag")
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step() -> None:
        optimizer.zero_grad()
        step_of(model)()
        optimizer.step()
        schedule.step()

    step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    rng, plain = torch.get_rng_state(), torch.utils.checkpoint.CheckpointFunction
    with torch.no_grad():  # of the caller, as in a notebook that looks at things
        audit = explorer.audit(model, step)
        assert audit.reruns and not torch.is_grad_enabled()
    assert audit.judged is not None and audit.judged.verdict == "different", "each run begins with the same schedule"
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 5e-4)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(moments, after)) and len(after) == len(moments)
    assert torch.equal(rng, torch.get_rng_state()) and model[1].use_checkpoint
    assert torch.utils.checkpoint.CheckpointFunction is plain


def test_a_model_that_carries_a_policy_is_refused() -> None:
    model = net("")
    with explorer.apply_policy(model, Policy.recompute(["1"])), pytest.raises(BadInput, match="carries a policy"):
        explorer.audit(model, step_of(model))


def test_a_transformer_with_its_own_checkpointing() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.activation_checkpointing_enable()
    model.train()
    ids = torch.randint(64, (2, 16))
    audit = explorer.audit(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert list(audit.reruns) == [f"model.layers.{i}" for i in range(3)] and set(audit.reruns.values()) == {1.0}
    assert audit.judged is not None and audit.is_same and model.is_activation_checkpointing
