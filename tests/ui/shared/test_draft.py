"""The draft: one step of undo a decision, options stay from model to model, and every change stands in the address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import streamlit as st

from explorer.record import ModelRef, Policy, RunSpec
from explorer.ui.session import address, backend
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import MOST_STEPS, Draft
from tests import graphs
from tests.ui.conftest import SAMPLES

GRAPH = graphs.gpt(6)
GPT = ModelRef(target="sample_models/gpt.py", size="small")


class Address(dict[str, str]):
    """The address bar: outside of a page there is none."""

    def to_dict(self) -> dict[str, str]:
        return dict(self)

    def from_dict(self, query: dict[str, str]) -> None:
        self.clear()
        self.update(query)


@pytest.fixture(autouse=True)
def bar(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    shown = Address()
    monkeypatch.setattr(st, "query_params", shown)
    monkeypatch.setattr(st, "session_state", {})
    monkeypatch.setattr(backend, "samples", lambda: SAMPLES)
    yield shown


@pytest.fixture
def draft() -> Draft:
    return Draft(spec=RunSpec(model=GPT))


def told(draft: Draft, **of_step: Any) -> None:
    """A step, as the browser tells it."""
    step = {"n": drafts.marks_of(draft, GRAPH).last_step + 1, **of_step}
    st.session_state[draft.widget] = {"steps": {"list": [step], "press": 0}}
    drafts.absorb(draft, GRAPH)


def test_every_decision_is_one_step_of_undo(draft: Draft, bar: Address) -> None:
    drafts.set_policy(draft, Policy.recompute(["head"]), GRAPH)
    told(draft, kind="on", ids=["norm"])
    drafts.set_option(draft, GRAPH, "early_stop", False)
    drafts.set_policy(draft, draft.spec.policy, GRAPH)
    assert [len(policy.units) for policy in draft.history.past] == [0, 1, 2], "what changes nothing is no step"
    for blocks in (("head", "norm"), ("head",), ()):
        told(draft, kind="undo")
        assert set(draft.spec.policy.blocks) == set(blocks)
        assert address.from_query(bar) == draft.spec
    told(draft, kind="undo")
    for _ in range(3):
        told(draft, kind="redo")
    assert not draft.spec.policy.early_stop and set(draft.spec.policy.blocks) == {"head", "norm"}
    told(draft, kind="undo")
    drafts.set_policy(draft, Policy.recompute(["embedding"]), GRAPH)
    assert not draft.history.future, "a new decision ends what could be made again"
    for i in range(MOST_STEPS + 5):
        drafts.set_policy(draft, Policy.recompute([f"blocks.{i % 2}"]), GRAPH)
    assert len(draft.history.past) == MOST_STEPS


@pytest.mark.parametrize(("model", "message"), [(GPT.target, ""), ("/etc/passwd:build", "not offered here")])
def test_a_link_without_a_size_is_about_the_usual_one(bar: Address, model: str, message: str) -> None:
    bar["model"] = model
    draft = drafts.current()
    assert draft.spec == RunSpec(model=GPT) and message in draft.message and bool(message) == bool(draft.message)


def test_another_model_starts_afresh_and_the_options_stay(draft: Draft) -> None:
    drafts.set_option(draft, GRAPH, "dtype", "float64")
    drafts.set_option(draft, GRAPH, "frozen", ("head",))
    drafts.set_policy(draft, Policy.recompute(["head"]), GRAPH)
    drafts.set_predict(draft, on=True)
    widget = draft.widget
    drafts.choose_model(draft, ModelRef(target="sample_models/unet.py"))
    assert (draft.spec.dtype, draft.spec.frozen, draft.spec.policy.units, draft.history.past) == ("float64", (), (), [])
    assert draft.predict and draft.widget != widget, "marks under way for the old model reach nobody"


def test_what_is_only_foreseen_is_so_in_the_address_and_on_the_cpu(draft: Draft, bar: Address) -> None:
    drafts.set_option(draft, GRAPH, "device", "cuda")
    drafts.set_predict(draft, on=True)
    assert bar["predict"] == "1" and draft.spec.device == "cpu"
    assert drafts.current().predict, "a visit with that address"
    assert "predict is on" in drafts.why_not_run(draft)
    drafts.set_predict(draft, on=False)
    assert "predict" not in bar and not drafts.why_not_run(draft)


def test_a_selected_block_is_unfolded_and_two_become_one_segment(draft: Draft) -> None:
    drafts.select(draft, GRAPH, "blocks.2.mlp")
    assert drafts.marks_of(draft, GRAPH).selected == "blocks.2.mlp"
    assert {"blocks", "blocks.2"} <= set(drafts.marks_of(draft, GRAPH).open)
    told(draft, kind="jump", ids=["head"])
    assert draft.jump == ("head", 2), "the second jump"
    drafts.set_policy(draft, Policy.recompute(["blocks.0", "blocks.1", "head"]), GRAPH)
    told(draft, kind="join", ids=["blocks.0", "blocks.1"])
    assert [unit.blocks for unit in draft.spec.policy.units if len(unit.blocks) > 1] == [("blocks.0", "blocks.1")]
