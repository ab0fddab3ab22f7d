"""A challenge is met by what a run measured and counted, and by nothing less."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.challenges import CHALLENGES, is_about, marks
from explorer.record.comparison import Comparison
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.graphs import compared, gpt

GPT = CHALLENGES["gpt"]


@pytest.fixture(scope="module")
def run() -> Comparison:
    graph = gpt(6)
    policy = RunSpec(model=GPT.model, policy=Policy.recompute([f"blocks.{i}" for i in range(5)]))
    return compared(graph, policy)


def test_each_mark_is_what_the_run_says(run: Comparison) -> None:
    peak, ratio = run.candidate.step_peak_bytes, run.headlines()["flop_ratio"]
    assert peak is not None and ratio is not None and is_about(GPT, run)
    just = msgspec.structs.replace(GPT, peak_bytes=peak, flop_ratio=ratio)
    assert [mark.met for mark in marks(just, run)] == [True, True, True]
    tight = msgspec.structs.replace(GPT, peak_bytes=peak - 1, flop_ratio=ratio - 1e-9)
    assert [mark.met for mark in marks(tight, run)] == [False, False, True]


def test_another_model_is_another_matter(run: Comparison) -> None:
    assert not is_about(CHALLENGES["resnet"], run)


def test_names_are_what_one_types() -> None:
    assert all(name == one.name and name.isidentifier() for name, one in CHALLENGES.items())
