"""A pinned run is the baseline of new ones, by name, also at the next visit."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Compare, Measure
from explorer.jobs.store import Store
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.file import evidence_of
from explorer.record import Policy
from explorer.record.base import to_plain
from explorer.record.policy_file import PolicyFile
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, graph_data, say, settle, texts
from tests.ui.runs.listing import ALL, SPEC, saved


def test_a_pinned_run_is_the_baseline_of_new_ones(app: Callable[..., AppTest], worker: FakeWorker) -> None:
    at = app()
    at.session_state["pinned"] = [to_plain(SPEC)]
    at = settle(at.run())
    at = settle(at.button(key="run").click().run())
    (job,) = worker.of(Compare)
    assert job.request.baseline.policy == SPEC.policy
    assert job.request.candidate.policy == Policy()


def test_a_pin_outlives_the_visit_and_needs_no_other_run(
    app: Callable[..., AppTest], worker: FakeWorker, store: Store
) -> None:
    store.pin(saved(store))
    at = app()
    assert not worker.of(Measure), "the store holds the run that was pinned"
    assert figures(at)["Step peak"] == "34.5 MiB"


def test_a_pinned_baseline_is_named_and_keeps_its_forecast(app: Callable[..., AppTest], store: Store) -> None:
    """The forecast is made from the run that kept everything, which is in the store."""
    store.pin(saved(store))
    at = say(app(), on=["blocks.0"])
    assert "pinned baseline" in texts(at) and r"recompute 6 blocks" in texts(at)
    assert figures(at)["Step peak"].startswith("34.5 → ≈")
    assert figures(at)["FLOPs"].startswith("≈ \N{MINUS SIGN}"), "against the pinned run, which recomputes more"
    assert "predicted, against the pinned baseline" in texts(at)
    assert graph_data(at)["labels"]["blocks"][0].startswith("90.0 → ≈"), "of kept blocks, not of recomputed ones"


def test_a_comparison_with_a_pinned_baseline_says_so_everywhere(
    app: Callable[..., AppTest], runs_page: Callable[..., AppTest], store: Store
) -> None:
    policy = Policy.recompute(ALL[:1])
    pair = graphs.compared(graphs.gpt(6), msgspec.structs.replace(SPEC, policy=policy))
    pair = msgspec.structs.replace(pair, baseline=graphs.measured(graphs.gpt(6), SPEC))
    evidence = evidence_of(pair)
    assert evidence is not None and evidence.baseline_policy == SPEC.policy
    assert policy_file.loads(policy_file.dumps(PolicyFile(policy=policy, evidence=evidence))).evidence == evidence
    store.save(pair)
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    assert row["step peak"] == "34.5 MiB (6 blocks recomputed) → 90.0 MiB"
