"""Settings of every form become one table; from it readers count layers and make a policy."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.errors import BadInput, UnreadableFile
from explorer.plan.imports import settings_format
from explorer.plan.imports.read_policy import read
from explorer.plan.imports.settings_format import (
    Meaning,
    Settings,
    layer_lists,
    longest_list,
    reading,
    refused,
    whole,
    within,
)
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit
from tests.graphs import gpt

FULL = "--recompute-granularity full --recompute-method"


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


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text(alphabet="-=:[]{}()\"'\\\n# ab1."))
def test_any_text_gives_a_table_or_an_error_of_ours(text: str) -> None:
    try:
        settings_of(text)
    except UnreadableFile as error:
        assert error.hint


def test_a_model_without_layers_is_refused(graph: ModelGraph) -> None:
    flat = msgspec.structs.replace(graph, blocks=graph.blocks[:3])
    for text in ("gradient_checkpointing: true", "activation_checkpoint:full", f"{FULL} uniform"):
        with pytest.raises(BadInput, match="numbered layers"):
            read(text, flat)


def test_statistics_move_twice_as_they_do_there(graph: ModelGraph) -> None:
    moving = tuple(
        msgspec.structs.replace(b, traits=("running_statistics",)) if b.fqn == "layers.1" else b for b in graph.blocks
    )
    reading = read(f"{FULL} block --recompute-num-layers 2", msgspec.structs.replace(graph, blocks=moving))
    assert reading.policy.running_stats == "every_forward" and any("move twice" in note for note in reading.notes)


def test_lists_of_layers_are_found_by_their_holder() -> None:
    assert layer_lists(gpt(3, names="model.layers")) == {"model.layers": tuple(f"model.layers.{i}" for i in range(3))}
    holder, layers = longest_list("x", gpt(2))
    assert (holder, layers) == ("blocks", ("blocks.0", "blocks.1"))


def test_blocks_inside_of_layers_go_by_their_names() -> None:
    graph = gpt(2)
    assert within(graph, ("blocks.1",), ("mlp",)) == ("blocks.1.mlp",)
    assert within(graph, ("blocks.0",), ("no_such",)) == ()
    assert whole(("a", "b")) == (Unit(blocks=("a",)), Unit(blocks=("b",)))


def test_a_reading_with_reasons_is_approximated() -> None:
    graph = gpt(2)
    plain = reading("X 1", graph, Meaning(units=whole(("blocks.0",)), options=(("early_stop", False),)))
    assert (plain.fit, plain.source, plain.policy.early_stop) == ("exact", "X 1", False)
    assert reading("X 1", graph, Meaning(reasons=("lost",))).fit == "approximated"
    assert refused("X 1", "no.").hint != "" and "X 1" in refused("X 1", "no.").sentence
