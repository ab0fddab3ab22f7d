"""Settings and policy files of other programs: how each form is read, and what a policy becomes of it."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from explorer.errors import BadInput, InvalidPolicy, UnreadableFile
from explorer.plan.export.formats import exported
from explorer.plan.imports import settings_format
from explorer.plan.imports.read_policy import named, read
from explorer.plan.imports.settings_format import Settings
from explorer.plan.policy import file as policy_file
from explorer.record.files import PolicyFile
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit
from tests.graphs import gpt


@pytest.fixture
def graph() -> ModelGraph:
    return gpt(8, names="layers")


FULL = "--recompute-granularity full --recompute-method"
FIRST = f"{FULL} block --recompute-num-layers"
ON = "gradient_checkpointing: true"
SELECTIVE = '[activation_checkpoint]\nmode = "selective"\nselective_ac_option ='


def settings_of(text: str) -> Settings:
    return settings_format.settings_of(text, settings_format._value(text))


@pytest.mark.parametrize(
    "text",
    [
        '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = 2\n',
        "activation_checkpoint:\n  mode: selective\n  selective_ac_option: 2\n",
        '{"activation_checkpoint": {"mode": "selective", "selective-ac-option": 2}}',
        "--activation_checkpoint.mode selective --activation-checkpoint.selective_ac_option=2",
        '# x\n--activation_checkpoint.mode "selective" \\\n  --activation_checkpoint.selective_ac_option 2 # y',
        "Config(activation_checkpoint={'mode': 'selective', 'selective_ac_option': 2})",
    ],
)
def test_every_form_says_the_same(text: str) -> None:
    assert settings_of(text) == {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": 2,
    }


def test_flags_without_a_value_lists_and_subcommands() -> None:
    assert settings_of("--recompute-activations --recompute-modules mlp moe --lr 1e-4") == {
        "recompute_activations": True,
        "recompute_modules": ["mlp", "moe"],
        "lr": "1e-4",
    }
    assert settings_of("--steps 2 activation-checkpoint:memory-budget --activation_checkpoint.memory_budget 0.5") == {
        "steps": 2,
        "activation_checkpoint.mode": "memory_budget",
        "activation_checkpoint.memory_budget": 0.5,
    }


def test_a_call_in_python_is_read_and_not_run() -> None:
    text = "import os\nmodel.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': os.abort()})"
    assert settings_of(text) == {"gradient_checkpointing": True}
    given = settings_of("--gradient_checkpointing_kwargs '{\"use_reentrant\": false}'")
    assert given == {"gradient_checkpointing_kwargs.use_reentrant": False}


def test_one_thing_said_twice_is_refused() -> None:
    with pytest.raises(UnreadableFile, match="recompute_num_layers is given twice: 1 and 2"):
        settings_of("--recompute-num-layers 1 --recompute_num_layers 2")


@pytest.mark.parametrize(
    "script",
    [
        '#!/bin/bash\nARGS="--recompute-granularity full --recompute-method block"\ntorchrun train.py $ARGS\n',
        "DATA_ARGS_LIST+=(\n  --num-workers 1\n)\nARGS=(--recompute-activations)\n",
        "torchrun pretrain_gpt.py --recompute-granularity full --recompute-num-layers 1",
        "accelerate launch trl/scripts/sft.py --model m \\\n    --gradient_checkpointing \\\n    --bf16",
        "options=' --recompute-granularity ${GRANULARITY} '\n" + "echo 'x\n" * 20_000,
    ],
)
def test_a_script_is_refused_with_what_to_do(script: str) -> None:
    with pytest.raises(UnreadableFile, match=r"a script in which the flag --\w+[-_]\w+") as caught:
        settings_of(script)
    assert "check --flags" in caught.value.hint


@settings(max_examples=50, deadline=None)
@given(st.text() | st.text(alphabet="-=:[]{}()\"'\\\n# ab1."))
def test_any_text_gives_a_table_or_an_error_of_ours(text: str) -> None:
    try:
        settings_of(text)
    except UnreadableFile as error:
        assert error.hint


def test_a_model_without_layers_is_refused(graph: ModelGraph) -> None:
    flat = replace(graph, blocks=graph.blocks[:3])
    for text in ("gradient_checkpointing: true", "activation_checkpoint:full", f"{FULL} uniform"):
        with pytest.raises(BadInput, match="numbered layers"):
            read(text, flat)


def test_statistics_move_twice_as_they_do_there(graph: ModelGraph) -> None:
    traits = {"layers.1": ("running_statistics",)}
    moving = tuple(replace(block, traits=traits.get(block.fqn, ())) for block in graph.blocks)
    reading = read(f"{FIRST} 2", replace(graph, blocks=moving))
    assert reading.policy.running_stats == "every_forward" and any("move twice" in note for note in reading.notes)


LAYERS = tuple(f"layers.{i}" for i in range(8))


def joinable(graph: ModelGraph) -> ModelGraph:
    """The same where each layer hands on to the next."""
    before = dict(zip(LAYERS[1:], LAYERS))
    blocks = (replace(block, follows=before.get(block.fqn, "")) for block in graph.blocks)
    return replace(graph, blocks=tuple(blocks))


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("gradient_checkpointing: false", ()),
        ('[activation_checkpoint]\nmode = "none"', ()),
        ('[activation_checkpoint]\nmode = "full"', LAYERS),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "3"', ("layers.2", "layers.5")),
        ("activation_checkpoint:full", LAYERS),
        (f"{FIRST} 3", LAYERS[:3]),
        (f"{FIRST} 1 --pipeline-model-parallel-size 4", LAYERS[::2]),
        (f"{FIRST} 2 --num-layers-per-virtual-pipeline-stage 4", (*LAYERS[:2], *LAYERS[4:6])),
        (f"{FULL} uniform --recompute-num-layers 1", LAYERS),
        ("recompute_granularity: full\nrecompute_method: null\nrecompute_layer_ids: '0,3'", (LAYERS[0], LAYERS[3])),
        ("recompute_granularity: selective\nrecompute_modules: [mlp]", tuple(f"{fqn}.mlp" for fqn in LAYERS)),
        ("--lr 1e-4 --recompute_num_layers 2", ()),
        (
            "ARGS:\n  --recompute-granularity: full\n  --recompute-method: block\n  --recompute-num-layers: 3",
            LAYERS[:3],
        ),
        ("disable_gradient_checkpointing: true\nfinetuning_type: lora", ()),
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
        (f"{ON}\ngradient_checkpointing_kwargs: {{offload: true}}", "offload: there the inputs"),
        ("gradient_checkpointing: true\ngradient_checkpointing_kwargs: {debug: true}", "debug is not read"),
        ("gradient_checkpointing: false\nfsdp_config: {activation_checkpointing: true}", "FSDP would wrap"),
        ("finetuning_type: lora\nstage: sft", "counted instead: layers"),
        ("finetuning_type: full\ndisable_gradient_checkpointing: false", "counted instead: layers"),
        ("gradient_checkpointing: true\nactivation_offloading: legacy", "activation_offloading: there the inputs"),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"', "every second matrix product"),
        ("activation_checkpoint:full --activation_checkpoint.ac_config x", "ac_config is not read"),
        (f"{FIRST} 2 --num-layers 32", "for 32 layers; this model has 8"),
        (f"{FIRST} 2 --pipeline-model-parallel-layout 'Et|tL'", "layout is not read"),
        (f"{FIRST} 2 --recompute-granularty x", "recompute_granularty is not read"),
        ("--recompute-granularity selective --recompute-modules mlp core_attn", "core_attn is recomputed there"),
    ],
)
def test_what_is_lost_is_said(text: str, reason: str, graph: ModelGraph) -> None:
    reading = read(text, graph)
    assert reading.fit == "approximated" and any(reason in sentence for sentence in reading.reasons), reading.reasons


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{ON}\nrecompute_granularity: full", "those of transformers (gradient_checkpointing) and of Meg"),
        (f"version: 1\npolicy: {{units: []}}\n{ON}", "a policy file that also holds settings of transf"),
        ("gradient_checkpointing: true\nactivation_checkpointing: false", "say different things"),
        ("gradient_checkpointing: true\ngradient_checkpointing_kwargs: {every_n_layers: 0}", "every_n_layers is 0"),
        ("gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: 'no'}", "use_reentrant"),
        ('[activation_checkpoint]\nmode = "memory_budget"', "names no blocks"),
        (
            '[activation_checkpoint]\nmode = "some"',
            "torchtitan of 2025, or 0.3.0 cannot be said as a policy: there is no mode 'some'",
        ),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "ops"', "selective_ac_option is 'ops'"),
        (f"{FULL} bloc --recompute-num-layers 2", "recompute_method is 'bloc'"),
        (f"{FIRST} two", "recompute_num_layers is 'two'"),
        (f"{FIRST} 0", "recompute_num_layers is 0"),
        (f"{FIRST} 2 --pipeline-model-parallel-size 3", "8 layers do not go evenly into 3"),
        ("--recompute-granularity most", "there is no granularity 'most'"),
        ("recompute_modules: [{a: 1}]", "no block of this model stands for {'a': 1}"),
        ("--recompute-activations", "no block of this model stands for core_attn"),
        ("recompute_granularity: full\nrecompute_layer_ids: 3,8", "there is no layer 8; they go from 0 to 7"),
        ("fsdp_config:\n  fsdp_activation_checkpointing: true", "settings of accelerate"),
        ("model: {name: mpt}\nfsdp_config: {activation_checkpointing: true}", "settings of Composer or llm-foundry"),
        ("gradient_checkpointing: [true]", "gradient_checkpointing is [True]"),
        ("disable_gradient_checkpointing: 3", "disable_gradient_checkpointing is 3"),
        ('[activation_checkpoint]\nmode = "full"\nearly_stop = [1]', "early_stop"),
        (f"{FIRST} 1 --num-layers-per-virtual-pipeline-stage x", "stage is 'x'"),
        ("learning_rate: 3", "no field `version`"),
        ("", "no field `version`"),
    ],
)
def test_every_refusal_is_one_sentence_and_says_what_next(text: str, words: str, graph: ModelGraph) -> None:
    with pytest.raises((UnreadableFile, InvalidPolicy)) as caught:
        read(text, graph)
    assert words in caught.value.sentence and "\n" not in caught.value.sentence and caught.value.hint


def test_what_was_exported_exactly_is_read_back(graph: ModelGraph) -> None:
    policy = Policy.recompute(LAYERS[:3])
    form = exported(policy_file.file_of(policy, graph), "megatron")
    assert form.fit == "exact" and read(form.text, graph).policy == policy


KEYS = (
    "gradient_checkpointing", "disable_gradient_checkpointing", "finetuning_type", "activation_offloading",
    "gradient_checkpointing_kwargs", "use_reentrant", "every_n_layers", "offload", "activation_checkpoint", "mode",
    "selective_ac_option", "early_stop", "preserve_rng_state", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "recompute_modules", "recompute_layer_ids", "recompute_activations", "num_layers",
    "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "fsdp_config", "version", "policy",
    "units",    "MODEL_ARGS", "activation_checkpointing", "fsdp_activation_checkpointing", "model",
)  # fmt: skip
VALUES = st.recursive(
    st.sampled_from(
        [True, False, None, 0, 1, -3, 1e9, "full", "block", "selective", "uniform", "op", "2", "", "\x1b[1m", "x" * 500]
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5))
def test_any_value_of_any_setting_is_read_or_refused_in_one_short_sentence(settings: dict[str, object]) -> None:
    try:
        assert read(json.dumps(settings), gpt(8, names="layers")).fit in ("exact", "approximated")
    except (UnreadableFile, InvalidPolicy) as error:
        assert error.sentence.isprintable() and "x" * 300 not in error.sentence


LARGE = {
    "a list": "- a\n" * 60_000,
    "a name": f"version: 1\npolicy: {{units: [{'b' * 220_000}]}}",
    "units": "version: 1\npolicy:\n  units:\n" + "  - layers.*\n" * 7_000 + "  - gone\n",
    "patterns": "version: 1\npolicy:\n  units:\n" + "".join(f"  - 'layers.*.x{i}'\n" for i in range(3_600)),
    "wrong units": "version: 1\npolicy:\n  units:\n" + "  - {blocks: 3}\n" * 2_200,
    "other settings": "gradient_checkpointing: [1]\n" + "".join(f"a{i}: '{{b: 1}}'\n" for i in range(3_600)),
    "flags": "--recompute-granularity no " + " ".join(f"--a{i} 1" for i in range(22_000)),
    "modules": f"recompute_granularity: selective\nrecompute_modules: [{', '.join(f'm{i}' for i in range(7_000))}]",
    "layer ids": f"recompute_granularity: full\nrecompute_layer_ids: '{'1' * 220_000}'",
    "stride": f"activation_checkpoint: {{mode: selective, selective_ac_option: '{'1' * 9_000}'}}",
    "regions": "save_regions: [" + ", ".join(f"'*{i}*a'" for i in range(7_000)) + "]",
    "a pattern": f"version: 1\npolicy: {{units: ['{'*a' * 100_000}']}}",
    "a key of many parts": "a." * 24_000 + "b = 1",
    "python": "f(gradient_checkpointing=[1])\n" + "x = [1, 2]\n" * 20_000,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_file_is_refused_by_few_steps_and_in_few_words(name: str, graph: ModelGraph) -> None:
    """Steps are counted, not seconds: each is a call of a Python function."""
    n_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        with pytest.raises((UnreadableFile, InvalidPolicy)) as caught:
            read(LARGE[name], graph)
    finally:
        sys.setprofile(None)
    assert n_calls < 620_000 and len(str(caught.value)) < 2500


def test_patterns_of_a_policy_file_become_names_and_are_reported(graph: ModelGraph) -> None:
    text = """\
version: 1
policy:
  units:
  - layers.*.mlp
  - {blocks: [layers.3.mlp], action: offload}
  - [layers.*.attention, layers.*]
"""
    reading = read(text.replace("  - [layers.*.attention, layers.*]\n", ""), graph)
    assert reading.fit == "exact" and len(reading.policy.units) == 8
    assert reading.policy.units[-1] == Unit(blocks=("layers.3.mlp",), action="offload")
    assert "layers.*.mlp stands for 8 units: layers.0.mlp, layers.1.mlp, layers.2.mlp and 5 more." in reading.notes
    pairs = read(text.replace("  - layers.*.mlp\n", "").replace("layers.*]", "layers.*.mlp]"), graph).policy.units
    assert Unit(blocks=("layers.0.attention", "layers.0.mlp")) in pairs and len(pairs) == 8
    with pytest.raises(InvalidPolicy, match=r"No block matches 'layer\.\*\.mlp'"):
        read(text.replace("layers.*.mlp", "layer.*.mlp"), graph)


def test_blocks_are_named_as_they_are_or_by_patterns(graph: ModelGraph) -> None:
    assert named("layers.1.mlp", graph).policy == Policy.recompute(["layers.1.mlp"])
    both = named("layers.0,layers.*.attention", graph).policy
    assert both.blocks[0] == "layers.0" and len(both.units) == 9
    with pytest.raises(InvalidPolicy, match="neither a preset, nor a block, nor a file"):
        named("layers.1,layer.2", graph)


def test_a_changed_model_is_applied_by_name_with_a_sentence(graph: ModelGraph) -> None:
    text = policy_file.dumps(policy_file.file_of(Policy.recompute(LAYERS[:2]), graph))
    assert read(text, graph).messages == ()
    deeper = read(text, gpt(12, names="layers"))
    assert deeper.policy == Policy.recompute(LAYERS[:2])
    assert "layers.* are 12, and were 8" in deeper.changed and "new" not in deeper.changed
    wider = tuple(replace(block, parameter_bytes=7) for block in graph.blocks)
    assert "kinds or parameters" in read(text, replace(graph, blocks=wider)).changed
    with pytest.raises(InvalidPolicy, match=r"no block layers\.0, layers\.1 \(2 of the 2.*new: blocks; gone: layers"):
        read(text, gpt(8, names="blocks"))


def test_a_file_by_hand_is_judged_by_its_names(graph: ModelGraph) -> None:
    by_hand = policy_file.dumps(PolicyFile(policy=Policy.recompute(["layers.1"])))
    assert read(by_hand, graph).messages == ()
    with pytest.raises(InvalidPolicy, match=r"no block layer\.1 ") as caught:
        read(by_hand.replace("layers.1", "layer.1"), graph)
    assert "Did you mean layers.1" in caught.value.hint
    stale = policy_file.dumps(PolicyFile(policy=Policy.recompute(["layers.1"]), fingerprint="0" * 16))
    assert "names, kinds or parameters differ" in read(stale, graph).changed


def test_a_group_of_layers_is_a_segment_where_they_hand_on(graph: ModelGraph) -> None:
    text = f"{FULL} uniform --recompute-num-layers 3 --pipeline-model-parallel-size 2"
    groups = [LAYERS[0:3], LAYERS[3:4], LAYERS[4:7], LAYERS[7:8]]
    joined = read(text, joinable(graph))
    assert "Read by its documented grammar; Megatron-LM itself was not run." in joined.notes
    assert joined.fit == "exact" and joined.policy.units == tuple(Unit(blocks=group) for group in groups)
    apart = read(text, graph)
    assert apart.fit == "approximated" and apart.policy == Policy.recompute(LAYERS)
    assert "layers.0 and layers.1 and layers.2 cannot be recomputed together here" in apart.reasons[0]
