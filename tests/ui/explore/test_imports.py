"""What a person brings along is drawn, and what was lost on the way is told until it was read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from explorer.plan.policy import file as policy_file
from explorer.record.policy import Policy
from tests import graphs
from tests.ui.page_driver import graph_data, settle, texts

App = Callable[..., AppTest]
ALL = [f"blocks.{i}" for i in range(6)]


def upload(at: AppTest, name: str, text: str) -> AppTest:
    at.file_uploader(key="upload_policy").upload(name, text.encode())
    return settle(at.run())


@pytest.mark.parametrize(
    ("name", "text", "chosen", "words"),
    [
        ("titan.toml", '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"', ALL[1::2], "exact"),
        ("args.sh", "--recompute-granularity full --recompute-method block --recompute-num-layers 2", ALL[:2], "exact"),
        ("trainer.json", '{"gradient_checkpointing": true}', ALL, "has no layer of transformers; counted instead"),
        ("policy.yaml", "version: 1\npolicy: {units: [blocks.*]}", ALL, "blocks.* stands for 6 units"),
        (
            "other.yaml",
            policy_file.dumps(policy_file.file_of(Policy.recompute(ALL[:1]), graphs.gpt(4))),
            ALL[:1],
            "blocks.* are 6, and were 4",
        ),
    ],
)
def test_it_is_drawn_and_told_until_read(app: App, name: str, text: str, chosen: list[str], words: str) -> None:
    at = upload(app(), name, text)
    assert graph_data(at)["on"] == chosen
    told = texts(at).replace("\\", "")
    assert "read from" in told and words in told
    at = settle(at.button(key="read_understood").click().run())
    assert "read from" not in texts(at) and graph_data(at)["on"] == chosen


def test_what_fits_needs_no_words(app: App) -> None:
    fresh = policy_file.dumps(policy_file.file_of(Policy.recompute(ALL[:2]), graphs.gpt(6)))
    at = upload(app(), "policy.yaml", fresh)
    assert graph_data(at)["on"] == ALL[:2] and "read from" not in texts(at)


def test_two_programs_at_once_are_refused_and_nothing_changes(app: App) -> None:
    at = upload(app(), "both.yaml", "gradient_checkpointing: true\nrecompute_granularity: full\n")
    assert graph_data(at)["on"] == []
    assert "those of transformers (gradient_checkpointing) and of Megatron-LM (recompute_granularity)" in texts(at)
