"""Policies from outside on a model: what is exact, what is lost, and every way to be refused in one sentence."""

from __future__ import annotations

import msgspec
import pytest

from explorer.errors import BadInput, InvalidPolicy, UnreadableFile
from explorer.plan.export.formats import exported
from explorer.plan.imports.door import read
from explorer.plan.policy import file as policy_file
from explorer.record.graph import Block, ModelGraph
from explorer.record.policy import Policy, Unit
from explorer.record.policy_file import PolicyFile
from tests.graphs import gpt

LAYERS = tuple(f"layers.{i}" for i in range(8))
FULL = "--recompute-granularity full --recompute-method"


@pytest.fixture
def graph() -> ModelGraph:
    return gpt(8, names="layers")


def joinable(graph: ModelGraph) -> ModelGraph:
    """The same where each layer hands on to the next."""
    blocks: list[Block] = []
    for block in graph.blocks:
        before = f"layers.{int(block.name) - 1}" if block.fqn in LAYERS[1:] else ""
        blocks.append(msgspec.structs.replace(block, follows=before))
    return msgspec.structs.replace(graph, blocks=tuple(blocks))


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
    found = read(text, graph)
    assert (found.fit, found.reasons) == ("exact", ())
    stops = "activation_checkpoint" not in text or not chosen  # torchtitan's wrapper runs a recompute to its end
    assert found.policy == Policy.recompute(chosen, early_stop=stops)
    assert found.file.fingerprint == graph.fingerprint


def test_a_group_of_layers_is_a_segment_where_they_hand_on(graph: ModelGraph) -> None:
    text = f"{FULL} uniform --recompute-num-layers 3 --pipeline-model-parallel-size 2"
    groups = [LAYERS[0:3], LAYERS[3:4], LAYERS[4:7], LAYERS[7:8]]
    joined = read(text, joinable(graph))
    assert "Read by its documented grammar; Megatron-LM itself was not run." in joined.notes
    assert joined.fit == "exact" and joined.policy.units == tuple(Unit(blocks=group) for group in groups)
    apart = read(text, graph)
    assert apart.fit == "approximated" and apart.policy == Policy.recompute(LAYERS)
    assert "layers.0 and layers.1 and layers.2 cannot be recomputed together here" in apart.reasons[0]


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
    found = read(text, graph)
    assert found.fit == "approximated" and any(reason in sentence for sentence in found.reasons), found.reasons


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


def test_a_model_without_layers_is_refused(graph: ModelGraph) -> None:
    flat = msgspec.structs.replace(graph, blocks=graph.blocks[:3])
    for text in ("gradient_checkpointing: true", "activation_checkpoint:full", f"{FULL} uniform"):
        with pytest.raises(BadInput, match="numbered layers"):
            read(text, flat)


@pytest.mark.parametrize("target", ["megatron", "primus"])
def test_what_was_exported_exactly_is_read_back(target: str, graph: ModelGraph) -> None:
    policy = Policy.recompute(LAYERS[:3])
    form = exported(policy_file.file_of(policy, graph), target)
    assert form.fit == "exact" and read(form.text, graph).policy == policy


def test_statistics_move_twice_as_they_do_there(graph: ModelGraph) -> None:
    moving = tuple(
        msgspec.structs.replace(b, traits=("running_statistics",)) if b.fqn == "layers.1" else b for b in graph.blocks
    )
    found = read(f"{FULL} block --recompute-num-layers 2", msgspec.structs.replace(graph, blocks=moving))
    assert found.policy.running_stats == "every_forward" and any("move twice" in note for note in found.notes)


def test_patterns_of_a_policy_file_become_names_and_are_reported(graph: ModelGraph) -> None:
    text = """\
version: 1
policy:
  units:
  - layers.*.mlp
  - {blocks: [layers.3.mlp], action: offload}
  - [layers.*.attention, layers.*]
"""
    found = read(text.replace("  - [layers.*.attention, layers.*]\n", ""), graph)
    assert found.fit == "exact" and len(found.policy.units) == 8
    assert found.policy.units[-1] == Unit(blocks=("layers.3.mlp",), action="offload")
    assert "layers.*.mlp stands for 8 units: layers.0.mlp, layers.1.mlp, layers.2.mlp and 5 more." in found.notes
    pairs = read(text.replace("  - layers.*.mlp\n", "").replace("layers.*]", "layers.*.mlp]"), graph).policy.units
    assert Unit(blocks=("layers.0.attention", "layers.0.mlp")) in pairs and len(pairs) == 8
    with pytest.raises(InvalidPolicy, match=r"No block matches 'layer\.\*\.mlp'"):
        read(text.replace("layers.*.mlp", "layer.*.mlp"), graph)


def test_a_changed_model_is_taken_by_name_and_told(graph: ModelGraph) -> None:
    text = policy_file.dumps(policy_file.file_of(Policy.recompute(LAYERS[:2]), graph))
    assert read(text, graph).told == ()
    deeper = read(text, gpt(12, names="layers"))
    assert deeper.policy == Policy.recompute(LAYERS[:2])
    assert "layers.* are 12, and were 8" in deeper.changed and "new" not in deeper.changed
    wider = tuple(msgspec.structs.replace(block, parameter_bytes=7) for block in graph.blocks)
    assert "kinds or parameters" in read(text, msgspec.structs.replace(graph, blocks=wider)).changed
    renamed = gpt(8, names="blocks")
    with pytest.raises(
        InvalidPolicy, match=r"has no block layers\.0, layers\.1 \(2 of the 2.*new: blocks; gone: layers"
    ):
        read(text, renamed)


def test_a_file_by_hand_is_judged_by_its_names(graph: ModelGraph) -> None:
    by_hand = policy_file.dumps(PolicyFile(policy=Policy.recompute(["layers.1"])))
    assert read(by_hand, graph).told == ()
    with pytest.raises(InvalidPolicy, match=r"no block layer\.1 ") as caught:
        read(by_hand.replace("layers.1", "layer.1"), graph)
    assert "Did you mean layers.1" in caught.value.hint
    stale = policy_file.dumps(PolicyFile(policy=Policy.recompute(["layers.1"]), fingerprint="0" * 16))
    assert "names, kinds or parameters differ" in read(stale, graph).changed
