"""A plan for other programs: stage lists and torch's CSV come out of a policy file."""

from __future__ import annotations

import json

import pytest

from explorer.errors import InvalidPlan
from explorer.plan.export.formats import exported
from explorer.plan.pipeline.actions import from_csv
from explorer.plan.pipeline.orders import one_f_one_b
from explorer.record.policy import KEEP_ALL
from explorer.record.policy_file import PolicyFile
from explorer.record.run import PipelinePlan

FILE = PolicyFile(
    policy=KEEP_ALL, pipeline=PipelinePlan(stages=(("a", "b"), ("c",)), n_microbatches=3, schedule="1F1B")
)


def test_stages_and_schedule_are_exported() -> None:
    assert json.loads(exported(FILE, "stages").text) == [["a", "b"], ["c"]]
    assert from_csv(exported(FILE, "schedule").text) == one_f_one_b(2, 3)


@pytest.mark.parametrize("target", ["stages", "schedule"])
def test_a_file_without_a_plan_says_so(target: str) -> None:
    with pytest.raises(InvalidPlan, match="holds no pipeline plan"):
        exported(PolicyFile(policy=KEEP_ALL), target)
