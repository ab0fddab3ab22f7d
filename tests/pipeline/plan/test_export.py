"""The stages of a policy file in the form of other programs."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from explorer.errors import InvalidPlan
from explorer.pipeline.plan.export import run_key
from explorer.plan.export.formats import exported
from explorer.record.files import PolicyFile
from explorer.record.graph import ModelRef
from explorer.record.policy import KEEP_ALL
from explorer.record.run import PipelinePlan, RunSpec

FILE = PolicyFile(
    policy=KEEP_ALL, pipeline=PipelinePlan(stages=(("a", "b"), ("c",)), n_microbatches=3, schedule="1F1B")
)


def test_stages_are_exported() -> None:
    assert json.loads(exported(FILE, "stages").text) == [["a", "b"], ["c"]]


def test_a_file_without_a_plan_says_so() -> None:
    with pytest.raises(InvalidPlan, match="holds no pipeline plan"):
        exported(PolicyFile(policy=KEEP_ALL), "stages")


def test_results_belong_to_a_run_wherever_its_models_file_lies() -> None:
    spec = RunSpec(model=ModelRef(target="here/m.py:net", size="small"), plan=FILE.pipeline)
    there = replace(spec, model=replace(spec.model, target="/there/m.py:net"))
    assert run_key(spec) == run_key(there)
    others = (replace(spec, plan=None), replace(spec, seed=1), replace(spec, model=replace(spec.model, size="large")))
    assert len({run_key(spec), *map(run_key, others)}) == 4
