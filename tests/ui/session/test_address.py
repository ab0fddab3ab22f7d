"""A link restores everything, and a broken one says so instead of restoring half."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import UnreadableFile
from explorer.record import ModelRef, Policy, RunSpec
from explorer.ui.session.address import LIMIT, from_query, to_query

names = st.text(min_size=1, max_size=20)
specs = st.builds(
    RunSpec,
    model=st.builds(
        ModelRef,
        target=names,
        size=st.none() | names,
        weights=st.just("") | names,
        arguments=st.dictionaries(names, st.integers(-5, 5) | st.booleans() | names, max_size=3),
    ),
    policy=st.builds(lambda blocks, early: Policy.recompute(blocks, early_stop=early), st.lists(names), st.booleans()),
    optimizer=st.sampled_from(["adamw", "sgd", "none"]),
    autocast=st.sampled_from(["none", "bfloat16"]),
    n_accumulation=st.integers(1, 9),
    frozen=st.lists(names).map(tuple),
    seed=st.integers(0, 99),
)


@given(specs)
def test_a_link_restores_the_whole_run(spec: RunSpec) -> None:
    assert from_query(to_query(spec)) == spec


def test_a_plain_run_has_a_plain_link() -> None:
    spec = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"))
    assert to_query(spec) == {"model": "sample_models/gpt.py", "size": "small"}
    assert from_query({}) is None


def test_a_thousand_blocks_fit_into_an_address() -> None:
    spec = RunSpec(model=ModelRef(target="x"), policy=Policy.recompute([f"blocks.{i}" for i in range(1000)]))
    assert len(to_query(spec)["run"]) < 6000


def pack(text: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(text)).decode()


@pytest.mark.parametrize(
    "run",
    [
        "not base64!",
        "YWJj",
        to_query(RunSpec(model=ModelRef(target="x"), seed=7))["run"][:-9],
        pack(b"{}"),
        pack(b'{"model": {"target": ""}, "unknown": 1}'),
        pack(b'{"model": {"target": ""}, "seed": "seven"}'),
        pack(b" " * (LIMIT + 1) + b"{}"),
    ],
    ids=["no base64", "no zlib", "cut short", "no model", "unknown field", "wrong type", "a bomb"],
)
def test_a_broken_link_is_one_sentence(run: str) -> None:
    with pytest.raises(UnreadableFile):
        from_query({"model": "x", "run": run})
