"""The stages of a policy file in the form of other programs."""

from __future__ import annotations

import json

import pytest

from explorer.errors import InvalidPlan
from explorer.plan.export.formats import exported
from explorer.record.files import PolicyFile
from explorer.record.policy import KEEP_ALL
from explorer.record.run import PipelinePlan

FILE = PolicyFile(
    policy=KEEP_ALL, pipeline=PipelinePlan(stages=(("a", "b"), ("c",)), n_microbatches=3, schedule="1F1B")
)


def test_stages_are_exported() -> None:
    assert json.loads(exported(FILE, "stages").text) == [["a", "b"], ["c"]]


def test_a_file_without_a_plan_says_so() -> None:
    with pytest.raises(InvalidPlan, match="holds no pipeline plan"):
        exported(PolicyFile(policy=KEEP_ALL), "stages")
