"""The list of runs: one model or all, sorted by figures, a run that was cut short without an arrow."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from streamlit.testing.v1 import AppTest

from explorer.jobs.store import Store
from explorer.record import Failure, ModelRef, RunSpec
from tests import graphs, pipelines
from tests.ui.runs.listing import SPEC


def test_the_list_says_what_a_run_costs(runs_page: Callable[..., AppTest], store: Store) -> None:
    pair = graphs.compared(graphs.gpt(6), SPEC)
    store.save(pair.baseline, "alone")
    store.save(pair, "both")
    rows = {row["name"]: row for row in runs_page().dataframe[0].value.to_dict("records")}
    both = pair.headlines()
    assert rows["both"]["FLOPs"] == f"+{both['flop_ratio'] - 1:.0%}".replace("%", " %")
    assert rows["alone"]["FLOPs"].endswith("FLOP")
    assert rows["both"]["step time"].startswith("×") and rows["alone"]["step time"].endswith(" ms")


def test_the_list_is_of_one_model_and_sorted_by_figures(runs_page: Callable[..., AppTest], store: Store) -> None:
    pair = graphs.compared(graphs.gpt(6), SPEC)
    store.save(pair.candidate, "low")
    store.save(pair.baseline, "high")
    other = msgspec.structs.replace(SPEC, model=ModelRef(target="sample_models/unet.py"))
    store.save(msgspec.structs.replace(pair.baseline, spec=other), "foreign")
    at = runs_page()
    assert [row["name"] for row in at.dataframe[0].value.to_dict("records")] == ["foreign", "high", "low"]
    at.selectbox(key="runs_model").select("sample_models/gpt.py").run()
    at.selectbox(key="runs_sort").select("least peak").run()
    rows = at.dataframe[0].value.to_dict("records")
    assert [row["name"] for row in rows] == ["low", "high"] and rows[0]["peak (MiB)"] < rows[1]["peak (MiB)"]


def test_a_run_that_was_cut_short_has_no_arrow_in_the_list(runs_page: Callable[..., AppTest], store: Store) -> None:
    pair = graphs.compared(graphs.gpt(6), SPEC)
    failure = Failure(kind="out of memory", sentence="Out of memory.")
    baseline = msgspec.structs.replace(pair.baseline, failure=failure)
    store.save(msgspec.structs.replace(pair, baseline=baseline, gradients=(), failure=failure), "cut")
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    assert row["step peak"] == "at least 104.5 MiB, then failed; 34.5 MiB"


def test_a_pipeline_run_shows_its_highest_rank_and_every_gradient(
    runs_page: Callable[..., AppTest], store: Store
) -> None:
    graph = graphs.gpt(6)
    run = pipelines.ran(graph, RunSpec(model=graph.model, plan=pipelines.planned(graph)), n_moved=1)
    store.save(run, "split")
    (row,) = runs_page().dataframe[0].value.to_dict("records")
    peaks = [memory.peak_bytes for memory in run.memory]
    assert row["step peak"] == f"{max(peaks) / 2**20:.1f} MiB on rank {peaks.index(max(peaks))}"
    assert row["gradients"] == f"{len(run.gradients) - 1} of {len(run.gradients)} equal"
