"""Settings in whatever form people keep them become the same flat table, and strangers' text never raises by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.errors import UnreadableFile
from explorer.plan.imports import settings as table
from explorer.plan.imports.settings import Settings


def settings_of(text: str) -> Settings:
    return table.settings_of(text, table._value(text))


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
