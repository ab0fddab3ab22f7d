"""A session outlives a reload of the code: what its objects held is carried over to the classes that are new."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import streamlit as st

from explorer.record import ModelRef, Policy, RunSpec
from explorer.ui.explore.state import ExploreState
from explorer.ui.session.kept import carried_over, kept
from explorer.ui.session.page_job import PageJob
from explorer.ui.shared.draft import Draft, History

SPEC = RunSpec(model=ModelRef(target="m.py"), policy=Policy.recompute(["a"]))


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    held: dict[str, Any] = {}
    monkeypatch.setattr(st, "session_state", held)
    return held


@dataclass(slots=True, kw_only=True)
class Earlier:
    """A draft as the code had it before: without what came since, with what has gone."""

    spec: RunSpec
    widget: str
    history: History[Policy] = field(default_factory=History)
    gone: int = 3


def test_the_same_object_from_one_run_to_the_next() -> None:
    first = kept("draft", Draft, lambda: Draft(spec=SPEC))
    assert kept("draft", Draft, lambda: Draft(spec=SPEC)) is first


def test_a_reload_carries_over_what_a_person_decided(session: dict[str, Any]) -> None:
    session["draft"] = Earlier(spec=SPEC, widget="w", history=History([Policy()]))
    draft = kept("draft", Draft, lambda: Draft(spec=RunSpec(model=ModelRef(target="other.py"))))
    assert draft == Draft(spec=SPEC, widget="w", history=History([Policy()]))
    assert session["draft"] is draft


@pytest.mark.parametrize("held", [{"spec": {"model": "old"}}, 3, Earlier(spec=3, widget="w")])  # type: ignore[arg-type]
def test_what_does_not_fit_starts_afresh(session: dict[str, Any], held: object) -> None:
    session["draft"] = held
    assert kept("draft", Draft, lambda: Draft(spec=SPEC, widget="new")).widget == "new"


def test_every_state_can_be_carried_over() -> None:
    state = ExploreState(draft=Draft(spec=SPEC), tick=("candidate", 3), job=PageJob(id="j", what="Compare"))
    assert carried_over(state, ExploreState) == state
