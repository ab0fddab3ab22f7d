"""The class for torchtitan's override point: called as torchtitan calls it, and by torchtitan itself where it is."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import nn

from explorer.plan.export.formats import exported
from explorer.record.run import PipelinePlan
from tests.plan.export.runs import (
    LAYERS,
    Chain,
    assert_same,
    chain_loss,
    file_of,
    module_of,
    ran_again,
    step,
    untouched,
)

PLAN = PipelinePlan(stages=(LAYERS[:2], LAYERS[2:]), n_microbatches=4, schedule="1F1B")


class ActivationCheckpointing:
    """The part of torchtitan's base class that an override has to do with, at 0.3.0."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config = config


@pytest.fixture(autouse=True)
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchtitan is not installed, the names that the file imports from it; else nothing is overridden yet."""
    try:
        from torchtitan.config.override import clear_overrides

        clear_overrides()
    except ImportError:
        points = types.ModuleType("torchtitan.distributed.activation_checkpoint")
        vars(points).update(ActivationCheckpointing=ActivationCheckpointing, SelectiveAC=ActivationCheckpointing)
        config = types.ModuleType("torchtitan.config")
        vars(config).update(
            derive=lambda given, kind: kind(preserve_rng_state=given.preserve_rng_state),
            override=lambda **point: lambda factory: factory,
        )
        distributed = types.ModuleType("torchtitan.distributed")
        vars(distributed).update(activation_checkpoint=points)
        for module in (types.ModuleType("torchtitan"), config, distributed, points):
            monkeypatch.setitem(sys.modules, module.__name__, module)


def applied(module: Any, model: Any) -> None:
    module.RecomputeBlocks(module.RecomputeBlocks.Config()).apply(model)


@pytest.mark.parametrize("chosen", [("layers.1", "layers.2"), ("layers.0", "layers.0.1", "layers.4.0"), ()])
def test_the_chosen_blocks_run_again_and_no_others(chosen: tuple[str, ...]) -> None:
    model, module = Chain(), module_of(file_of(*chosen), "torchtitan")
    plain, before = step(model, chain_loss, untouched)
    gradients, calls = step(model, chain_loss, lambda model: applied(module, model))
    assert ran_again(before, calls, LAYERS) == {name for name in LAYERS if any(one.startswith(name) for one in chosen)}
    assert_same(plain, gradients)


def test_a_model_part_has_some_of_the_blocks() -> None:
    module, part = module_of(file_of("layers.1", "layers.4"), "torchtitan"), Chain()
    del part.layers["4"]
    applied(module, part)
    assert type(part.layers["1"]).__name__ == "CheckpointWrapper"
    with pytest.raises(ValueError, match="Linear has none of the chosen blocks"):
        applied(module, nn.Linear(1, 1))


def test_an_own_schedule_is_not_given_out_as_one_by_name() -> None:
    own = msgspec.structs.replace(PLAN, actions=(("0F0", "0B0"), ("1F0", "1B0")), n_microbatches=1)
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
    override = pytest.importorskip("torchtitan.config.override")
    from torchtitan.config.configurable import Configurable
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    class Trainer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            activation_checkpoint: Configurable.Config = field(
                default_factory=lambda: SelectiveAC.Config(preserve_rng_state=False)
            )

    chosen = ("layers.1", "layers.2")
    (tmp_path / "recompute_blocks.py").write_text(exported(file_of(*chosen), "torchtitan").text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Trainer.Config()
    told = override.apply_overrides(override.OverrideConfig(imports=["recompute_blocks.recompute_blocks"]), config)
    assert len(told) == 1 and type(config.activation_checkpoint).__qualname__ == "RecomputeBlocks.Config"
    policy = config.activation_checkpoint.build(dump_folder=str(tmp_path))
    model = Chain()
    plain, before = step(model, chain_loss, untouched)
    gradients, calls = step(model, chain_loss, policy.apply)
    assert ran_again(before, calls, LAYERS) == set(chosen)
    assert_same(plain, gradients)
