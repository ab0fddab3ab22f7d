"""llm-foundry: the numbers of the chosen blocks as a list, which no single number could mean."""

from __future__ import annotations

import yaml

from explorer.plan.export.llm_foundry import to_llm_foundry
from tests.plan.export.runs import file_of


def test_chosen_blocks_are_listed_by_number() -> None:
    written = yaml.safe_load(to_llm_foundry(file_of("blocks.3", "blocks.0")).text)
    assert written["model"] == {"activation_checkpointing_target": {"mptblock": [0, 3]}}
    assert written["fsdp_config"] == {
        "activation_checkpointing": True, "activation_checkpointing_reentrant": False
    }  # fmt: skip


def test_nothing_chosen_is_switched_off_and_what_has_no_number_is_refused() -> None:
    assert yaml.safe_load(to_llm_foundry(file_of()).text)["fsdp_config"]["activation_checkpointing"] is False
    assert to_llm_foundry(file_of("head")).fit == "not expressible"
