"""torchtitan in both directions: it runs the exported class, and its settings mean what it then does itself.

What ran by its settings is counted operator by operator, so that also the end of a recompute and the operators it keeps
are seen.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import explorer
from explorer.plan.export.formats import exported
from explorer.plan.imports.read_policy import read
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelinePlan
from tests.engine.graphs import graph_of
from tests.plan.export.runs import (
    LAYERS,
    Calls,
    Chain,
    Gradients,
    assert_same,
    assert_these_alone_run_again,
    chain_loss,
    file_of,
    module_of,
    step,
)

activation_checkpoint = pytest.importorskip("torchtitan.distributed.activation_checkpoint")
override = pytest.importorskip("torchtitan.config.override")
FULL, SELECTIVE = activation_checkpoint.FullAC, activation_checkpoint.SelectiveAC
WORDS = torch.arange(16).reshape(2, 8)
PLAN = PipelinePlan(stages=(LAYERS[:2], LAYERS[2:]), n_microbatches=4, schedule="1F1B")


@pytest.fixture(autouse=True)
def without_overrides() -> None:
    override.clear_overrides()


def applied(module: Any, model: Any) -> None:
    module.RecomputeBlocks(module.RecomputeBlocks.Config()).apply(model)


@pytest.mark.parametrize("chosen", [("layers.1", "layers.2"), ("layers.0", "layers.0.1", "layers.4.0"), ()])
def test_the_chosen_blocks_run_again_and_no_others(chosen: tuple[str, ...]) -> None:
    module = module_of(file_of(*chosen), "torchtitan")
    layers = {name for name in LAYERS if any(one.startswith(name) for one in chosen)}
    assert_these_alone_run_again(Chain(), chain_loss, lambda model: applied(module, model), layers)


def test_a_model_part_has_some_of_the_blocks() -> None:
    module, part = module_of(file_of("layers.1", "layers.4"), "torchtitan"), Chain()
    del part.layers["4"]
    applied(module, part)
    assert type(part.layers["1"]).__name__ == "CheckpointWrapper"
    with pytest.raises(ValueError, match="Linear has none of the chosen blocks"):
        applied(module, nn.Linear(1, 1))


def test_an_own_schedule_is_not_given_out_as_one_by_name() -> None:
    own = replace(PLAN, actions=(("0F0", "0B0"), ("1F0", "1B0")), n_microbatches=1)
    module = module_of(file_of("layers.1", plan=own), "torchtitan")
    assert module.PIPELINE_PARALLEL_SCHEDULE == "PipelineScheduleMulti"


def test_stages_follow_as_lists() -> None:
    module = module_of(file_of("layers.1", plan=PLAN), "torchtitan")
    assert [list(LAYERS[:2]), list(LAYERS[2:])] == module.MODULE_FQNS_PER_MODEL_PART
    assert module.PIPELINE_PARALLEL_SCHEDULE == "1F1B"
    assert exported(file_of("layers.1"), "torchtitan").fit == "exact"


def test_torchtitan_finds_the_class_and_puts_it_into_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan.config.configurable import Configurable

    class Configured(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            activation_checkpoint: Configurable.Config = field(
                default_factory=lambda: SELECTIVE.Config(preserve_rng_state=False)
            )

    chosen = ("layers.1", "layers.2")
    (tmp_path / "recompute_blocks.py").write_text(exported(file_of(*chosen), "torchtitan").text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Configured.Config()
    told = override.apply_overrides(override.OverrideConfig(imports=["recompute_blocks.recompute_blocks"]), config)
    assert len(told) == 1 and type(config.activation_checkpoint).__qualname__ == "RecomputeBlocks.Config"
    policy = config.activation_checkpoint.build(dump_folder=str(tmp_path))
    assert_these_alone_run_again(Chain(), chain_loss, policy.apply, chosen)


class Layer(nn.Module):
    """Attention and a gated mlp, four products of matrices and two; the dropout at its end saves nothing it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.2)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(self.up(x).relu()))


class Decoder(nn.Module):
    """In the structure that torchtitan wants: a ModuleDict `layers`, by number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(3)})

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


class Operators(TorchDispatchMode):
    """How often each ran, inside of which layer; what a checkpoint kept does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def stepped(apply: Callable[[nn.Module], object]) -> tuple[Calls, Counter[str], Gradients]:
    """Calls of every module without children by name, of every operator, and the gradients of a step after `apply`."""
    torch.manual_seed(0)
    with Operators() as operators:
        gradients, calls = step(Decoder(), lambda model: model(WORDS).square().mean(), apply)
    return calls, operators.ran, gradients


def ours(text: str) -> Callable[[nn.Module], object]:
    policy = policy_of(text)
    return lambda model: explorer.apply_policy(model, policy)


def policy_of(text: str) -> Policy:
    policy: Policy = read(text, graph_of(Decoder(), WORDS)).policy
    return policy


def theirs(mode: Any, **options: Any) -> Callable[[nn.Module], object]:
    return lambda model: mode.Config(**options).build().apply(model)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("activation_checkpoint:full", {}),
        (
            "--activation_checkpoint.mode full --activation_checkpoint.determinism_check=none",
            {"determinism_check": "none"},
        ),
        ("activation-checkpoint:full --activation_checkpoint.no-preserve-rng-state", {"preserve_rng_state": False}),
    ],
)
def test_every_module_and_operator_runs_again_that_runs_again_there(text: str, options: dict[str, Any]) -> None:
    kept, _, _ = stepped(lambda model: None)
    calls, operators, gradients = stepped(ours(text))
    calls_there, operators_there, gradients_there = stepped(theirs(FULL, **options))
    assert calls == calls_there and operators == operators_there
    again = {name for name in calls if calls[name] > kept[name]}
    assert again == {name for name in calls if name.startswith("layers.")}
    assert_same(gradients, gradients_there)


def test_by_operator_all_is_as_there_but_every_second_product_of_matrices() -> None:
    plain = stepped(lambda model: None)[1]
    calls, operators, gradients = stepped(ours("activation_checkpoint:selective"))
    calls_there, operators_there, gradients_there = stepped(theirs(SELECTIVE))
    assert calls == calls_there
    assert_same(gradients, gradients_there)
    # Of the three products without a bias of each of three layers every second one: qkv, (out), down.
    assert operators_there["aten.mm.default"] - operators["aten.mm.default"] == 3
    assert operators["aten.mm.default"] == plain["aten.mm.default"]
    for counted in (operators, operators_there):
        del counted["aten.mm.default"]
    assert rearranged(operators) == rearranged(operators_there)


def rearranged(operators: Counter[str]) -> dict[str, int]:
    """Without views: those around a product are made again with it."""
    views = ("view", "transpose", "unsafe_view", "aten.t.default", "detach", "expand")
    return {name: n for name, n in operators.items() if not any(view in name for view in views)}


def test_the_operators_kept_are_those_it_keeps() -> None:
    save_ops = getattr(activation_checkpoint, "_get_default_save_ops")()  # noqa: B009
    known = {str(op) for op in save_ops if str(op).startswith("aten.")}
    (kept,) = {unit.save_ops for unit in policy_of("activation_checkpoint:selective").units}
    assert set(kept) == known


@dataclass(kw_only=True, slots=True)
class Trainer:
    """The one setting of its Trainer that is asked about."""

    activation_checkpoint: activation_checkpoint.ActivationCheckpointingConfig = field(default_factory=SELECTIVE.Config)


@pytest.mark.skipif(importlib.util.find_spec("typeguard") is None, reason="tyro needs it for a union of settings")
@pytest.mark.parametrize(
    "text",
    [
        "activation_checkpoint:full",
        "activation-checkpoint:full --activation_checkpoint.no-preserve-rng-state",
        "activation_checkpoint:full --activation_checkpoint.determinism-check=none",
        "activation_checkpoint:selective --activation_checkpoint.no_preserve_rng_state",
        "activation_checkpoint:none",
    ],
)
def test_a_command_line_is_read_as_its_own_parser_reads_it(text: str) -> None:
    import tyro

    policy = policy_of(text)
    config = tyro.cli(Trainer, args=text.split(), default=Trainer()).activation_checkpoint
    if config is None:
        assert policy == KEEP_ALL
        return
    actions = {FULL.Config: "recompute", SELECTIVE.Config: "save_ops"}
    assert {unit.action for unit in policy.units} == {actions[type(config)]}
    assert policy.preserve_rng_state == config.preserve_rng_state
    assert policy.determinism_check == config.determinism_check
