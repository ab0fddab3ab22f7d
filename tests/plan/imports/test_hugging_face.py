"""What the settings of transformers mean is what transformers itself then does: the flags of its own layers say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from explorer.plan.imports.read_policy import read
from explorer.record.graph import ModelGraph
from tests.engine.graphs import graph_of
from tests.plan.export.test_hugging_face import gpt2, llama, t5

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=[llama, gpt2, t5])
def opened(request: pytest.FixtureRequest) -> tuple[Any, ModelGraph]:
    model, _, _, more = request.param()
    return model, graph_of(model, {"input_ids": torch.arange(8).reshape(1, 8), **more})


def flagged(model: Any, **options: Any) -> set[str]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.activation_checkpointing_enable(**options)
    layers = [(fqn, one) for fqn, one in model.named_modules() if isinstance(one, GradientCheckpointingLayer)]
    return {fqn for fqn, layer in layers if layer.gradient_checkpointing}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_layers_are_those_that_transformers_flags(opened: tuple[Any, ModelGraph], every: int) -> None:
    model, graph = opened
    text = f"activation_checkpointing: true\nactivation_checkpointing_kwargs: {{every_n_layers: {every}}}"
    reading = read(text, graph)
    assert reading.fit == "exact" and set(reading.policy.blocks) == flagged(model, every_n_layers=every)


def test_the_options_are_taken_over(opened: tuple[Any, ModelGraph]) -> None:
    text = "TrainingArguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={'use_reentrant': True})"
    reading = read(text, opened[1])
    assert reading.policy.use_reentrant and reading.fit == "exact"
    call = read("model.gradient_checkpointing_enable({'use_reentrant': True})", opened[1])
    assert call.policy == reading.policy
