"""Exported Python files that torch alone can run: the chosen blocks run again and gradients stay bitwise the same."""

from __future__ import annotations

from typing import Any

import pytest

from explorer.plan.export.formats import exported
from tests.plan.export.runs import (
    Chain,
    file_of,
    module_of,
)

CODE = ("huggingface", "diffusers", "lightning", "fsdp2", "torchtitan", "composer")


@pytest.mark.parametrize("target", CODE)
def test_names_are_data_whatever_they_are(target: str) -> None:
    names = ('a"""\nraise SystemExit', "@BODY@", "b\\", "c'")
    text = exported(file_of(*names), target).text
    space: dict[str, Any] = {}
    decision = text[text.index("BLOCKS = (") : text.index("def chosen")]
    exec(decision, space)
    assert space["BLOCKS"] == names
    compile(text, target, "exec")


def test_a_model_without_the_blocks_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"Chain has no block layers\.7: export the policy for this very model"):
        module_of(file_of("layers.7"), "lightning").chosen(Chain())
