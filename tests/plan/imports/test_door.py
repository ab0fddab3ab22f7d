"""Policies from outside on a model: what is exact, what is lost, and every way to be refused in one sentence."""

from __future__ import annotations

import pytest

from explorer.errors import InvalidPolicy, UnreadableFile
from explorer.plan.export.formats import exported
from explorer.plan.imports.door import read
from explorer.plan.policy import file as policy_file
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy
from tests.plan.imports.layers import FULL, LAYERS


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("gradient_checkpointing: false", ()),
        ('[activation_checkpoint]\nmode = "none"', ()),
        ('[activation_checkpoint]\nmode = "full"', LAYERS),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "3"', ("layers.2", "layers.5")),
        ("activation_checkpoint:full", LAYERS),
        (f"{FULL} block --recompute-num-layers 3", LAYERS[:3]),
        (f"{FULL} block --recompute-num-layers 1 --pipeline-model-parallel-size 4", LAYERS[::2]),
        (
            f"{FULL} block --recompute-num-layers 2 --num-layers-per-virtual-pipeline-stage 4",
            (*LAYERS[:2], *LAYERS[4:6]),
        ),
        (f"{FULL} uniform --recompute-num-layers 1", LAYERS),
        (
            "recompute_granularity: full\nrecompute_method: null\nrecompute_layer_ids: '0,3,4'",
            tuple(LAYERS[i] for i in (0, 3, 4)),
        ),
        ("recompute_granularity: selective\nrecompute_modules: [mlp]", tuple(f"{fqn}.mlp" for fqn in LAYERS)),
        ("--lr 1e-4 --recompute_num_layers 2", ()),
    ],
)
def test_exact_settings(text: str, chosen: tuple[str, ...], graph: ModelGraph) -> None:
    reading = read(text, graph)
    assert (reading.fit, reading.reasons) == ("exact", ())
    stops = "activation_checkpoint" not in text or not chosen  # torchtitan's wrapper runs a recompute to its end
    assert reading.policy == Policy.recompute(chosen, early_stop=stops)
    assert reading.file.fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gradient_checkpointing: true", "has no layer of transformers; counted instead: layers"),
        (
            "activation_checkpointing: true\nactivation_checkpointing_kwargs: {offload: true}",
            "offload: there the inputs",
        ),
        ("gradient_checkpointing: true\ngradient_checkpointing_kwargs: {debug: true}", "debug is not read"),
        ("gradient_checkpointing: false\nfsdp_config: {activation_checkpointing: true}", "FSDP would wrap"),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"', "every second matrix product"),
        ("activation_checkpoint:full --activation_checkpoint.ac_config x", "ac_config is not read"),
        (f"{FULL} block --recompute-num-layers 2 --num-layers 32", "for 32 layers; this model has 8"),
        (f"{FULL} block --recompute-num-layers 2 --pipeline-model-parallel-layout 'Et|tL'", "layout is not read"),
        (f"{FULL} block --recompute-num-layers 2 --recompute-granularty x", "recompute_granularty is not read"),
        ("--recompute-granularity selective --recompute-modules mlp core_attn", "core_attn is recomputed there"),
    ],
)
def test_what_is_lost_is_said(text: str, reason: str, graph: ModelGraph) -> None:
    reading = read(text, graph)
    assert reading.fit == "approximated" and any(reason in sentence for sentence in reading.reasons), reading.reasons


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "gradient_checkpointing: true\nrecompute_granularity: full",
            "those of transformers (gradient_checkpointing) and of Meg",
        ),
        (
            "version: 1\npolicy: {units: []}\ngradient_checkpointing: true",
            "a policy file that also holds settings of transf",
        ),
        ("gradient_checkpointing: true\nactivation_checkpointing: false", "say different things"),
        ("gradient_checkpointing: true\ngradient_checkpointing_kwargs: {every_n_layers: 0}", "every_n_layers is 0"),
        ("gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: 'no'}", "use_reentrant is 'no'"),
        ('[activation_checkpoint]\nmode = "memory_budget"', "names no blocks"),
        ('[activation_checkpoint]\nmode = "some"', "there is no mode 'some'"),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "ops"', "selective_ac_option is 'ops'"),
        (f"{FULL} bloc --recompute-num-layers 2", "recompute_method is 'bloc'"),
        (f"{FULL} block --recompute-num-layers two", "recompute_num_layers is 'two'"),
        (f"{FULL} block --recompute-num-layers 2 --pipeline-model-parallel-size 3", "8 layers do not go evenly into 3"),
        ("--recompute-granularity most", "there is no granularity 'most'"),
        ("--recompute-activations", "no block of this model stands for core_attn"),
        ("recompute_granularity: full\nrecompute_layer_ids: 3,8", "there is no layer 8; they go from 0 to 7"),
        ("learning_rate: 3", "no field `version`"),
        ("", "no field `version`"),
    ],
)
def test_every_refusal_is_one_sentence_and_says_what_next(text: str, words: str, graph: ModelGraph) -> None:
    with pytest.raises((UnreadableFile, InvalidPolicy)) as caught:
        read(text, graph)
    assert words in caught.value.sentence and "\n" not in caught.value.sentence and caught.value.hint


@pytest.mark.parametrize("target", ["megatron", "primus"])
def test_what_was_exported_exactly_is_read_back(target: str, graph: ModelGraph) -> None:
    policy = Policy.recompute(LAYERS[:3])
    form = exported(policy_file.file_of(policy, graph), target)
    assert form.fit == "exact" and read(form.text, graph).policy == policy
