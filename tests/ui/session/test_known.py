"""What was measured is found again by what was asked, and never taken for an answer to another question."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import streamlit as st
from msgspec.structs import replace

from explorer.jobs.store import Store
from explorer.record import Failure, Measurement, ModelRef, Policy, RunSpec
from explorer.record.measurement import Refused
from explorer.ui.session import backend, known
from tests import graphs

GRAPH = graphs.gpt(6)
BASE = RunSpec(model=ModelRef(target="models/nowhere.py"))
CANDIDATE = replace(BASE, policy=Policy.recompute(["head"]))


@pytest.fixture(autouse=True)
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An app without a run."""
    st.cache_resource.clear()
    store = Store()
    monkeypatch.setattr(backend, "store", lambda: store)
    yield store
    st.cache_resource.clear()


def keep(key: str, record: object) -> None:
    backend.records().keep(key, record)
    known.note(key, record)


def run(spec: RunSpec = BASE, **changed: object) -> Measurement:
    return replace(graphs.measured(GRAPH, spec), **changed)


def test_a_run_answers_for_exactly_what_it_ran() -> None:
    keep("alone", run())
    assert known.measured(BASE) == ("alone", run())
    assert known.measured(replace(BASE, seed=1)) is None and known.measured(CANDIDATE) is None


def test_both_runs_of_a_comparison_are_found_and_the_pair() -> None:
    keep("pair", graphs.compared(GRAPH, CANDIDATE))
    measured = known.measured(CANDIDATE)
    assert measured is not None and measured[0] == "pair" and measured[1].spec == CANDIDATE
    assert known.compared(BASE, CANDIDATE) == "pair" and known.compared(CANDIDATE, BASE) is None
    assert [point.policy for point in known.points(BASE)] == [CANDIDATE.policy]


@pytest.mark.parametrize("change", [{"failure": Failure(kind="crash", sentence="It ended.")}, {"origin": "predicted"}])
def test_what_was_cut_short_or_only_foreseen_answers_nothing(change: dict[str, object]) -> None:
    keep("half", run(**change))
    assert known.measured(BASE) is None


def test_of_a_comparison_only_the_run_that_went_to_its_end_is_found() -> None:
    pair = graphs.compared(GRAPH, CANDIDATE)
    failure = Failure(kind="out of memory", sentence="Out of memory.")
    keep("pair", replace(pair, candidate=replace(pair.candidate, failure=failure)))
    assert known.measured(CANDIDATE) is None and known.measured(BASE) is not None and known.points(BASE) == ()


def test_what_fitted_is_found_by_what_was_refused() -> None:
    refused = Refused(what="everything kept", policy=Policy(), held_peak_bytes=1, failed_in="forward")
    keep("fits", run(CANDIDATE, refused=(refused,)))
    assert known.fitted(BASE) == ("fits", run(CANDIDATE, refused=(refused,))) and known.measured(BASE) is None


def test_a_deleted_run_is_forgotten_also_where_another_window_did_it() -> None:
    keep("pair", graphs.compared(GRAPH, CANDIDATE))
    known.forget("pair")
    assert known.compared(BASE, CANDIDATE) is None and known.points(BASE) == ()
    keep("gone", run())
    backend.records().drop(run())
    assert known.measured(BASE) is None, "memory and store have it no more"


def test_a_new_visit_reads_the_store_if_the_run_is_of_this_machine(app: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    here = run()
    monkeypatch.setattr(known.platform, "platform", lambda terse: here.environment.platform)
    elsewhere = replace(run(CANDIDATE), environment=replace(here.environment, platform="elsewhere"))
    run_id = app.save(here)
    app.save(elsewhere)
    assert known.measured(BASE) == (run_id, here) and known.measured(CANDIDATE) is None
