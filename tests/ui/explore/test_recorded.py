"""A step that was recorded in a script opens on the page without its model, and every policy is forecast from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest
from torch import nn

import explorer
from explorer.jobs.protocol import FindPlans
from explorer.jobs.run_file import open_files, stored_record, write
from explorer.jobs.store import Store
from explorer.own_loop.record_step import RecordedStep
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Policy
from explorer.ui.session import repository
from explorer.ui.session.address import to_query
from explorer.ui.shared.elements import escape
from explorer.view.drawing.units import mib
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import App, figures, graph_data, open_tab, say, settle, spec, texts


def runs(worker: FakeWorker) -> list[object]:
    """What was asked of the worker beside plans, which need no model."""
    return [job for job in worker.jobs.values() if not isinstance(job.request, FindPlans)]


def recorded(policy: Policy | None = None) -> RecordedStep:
    block = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*block)
    explorer.apply_policy(model, policy or Policy())
    with explorer.record_step(model) as run:
        model(torch.randn(512, 64)).square().mean().backward()
    return run


def opened_on(at: AppTest, run: RecordedStep, store: Store, tmp_path: Path) -> str:
    run_id = store.import_file(run.save(tmp_path / "step.explorer").read_bytes())
    at.session_state[repository.OPENED] = ["explore", run_id]
    settle(at.run())
    return run_id


def test_the_step_is_drawn_and_forecast_in_every_tab_and_nothing_runs(
    app: App, worker: FakeWorker, store: Store, tmp_path: Path
) -> None:
    at = app()
    n_jobs, run = len(runs(worker)), recorded()
    opened_on(at, run, store, tmp_path)
    assert len(runs(worker)) == n_jobs
    assert at.button(key="run").disabled and not [one for one in at.selectbox if one.label == "dtype"]
    assert escape(run.measurement.recorded_in) in texts(at) and "model is not here" in texts(at)
    assert [row[0] for row in graph_data(at)["geometry"]["rows"]] == ["0", "1", "2", "3"]
    assert figures(at)["Step peak"] == mib(run.peak_bytes)
    assert "recorded" in texts(at)
    assert all(reason in texts(at) for reason in run.why())
    say(at, on=["0", "1"])
    forecast = Forecaster(run.measurement, run.measurement.graph).forecast(Policy.recompute(["0", "1"]))
    assert figures(at)["Step peak"].endswith(f"≈ {mib(forecast.step_peak_bytes)}")
    assert forecast.step_peak_bytes is not None and forecast.step_peak_bytes < run.peak_bytes
    for tab in ("Cost", "Gradients", "More"):
        assert "model is not here" in texts(open_tab(at, tab))
    split = AppTest.from_string(
        "from explorer.ui.pipeline import page as pipeline\npipeline.page()\n", default_timeout=60
    )
    split.session_state["draft"] = at.session_state["draft"]
    split.run()
    assert not split.exception and "model is not here" in texts(split)


def test_files_of_ranks_open_as_their_fullest_rank_with_all_beside_it(
    app: App, worker: FakeWorker, store: Store
) -> None:
    light, full = (
        replace(run.measurement, rank=rank, n_ranks=3, recorded_in=f"train.py:7, step 2, rank {rank}")
        for rank, run in enumerate((recorded(Policy.recompute(["0", "1"])), recorded()))
    )
    stored = open_files([write(stored_record(run)) for run in (full, light)])
    at = app()
    n_jobs = len(runs(worker))
    at.session_state[repository.OPENED] = ["explore", store.import_file(write(stored))]
    settle(at.run())
    assert figures(at)["Step peak"] == mib(full.step_peak_bytes) and len(runs(worker)) == n_jobs
    assert "train.py:7, step 2" in texts(at).replace("\\", "") and at.button(key="run").disabled
    bars = next(chart for chart in at.get("plotly_chart") if "made of" in chart.proto.spec)
    assert json.loads(bars.proto.spec)["data"][0]["y"] == ["rank 0", "rank 1"]
    say(at, on=["0", "1", "2"])
    forecast = Forecaster(full, full.graph).forecast(Policy.recompute(["0", "1", "2"]))
    assert figures(at)["Step peak"].endswith(f"≈ {mib(forecast.step_peak_bytes)}")
    again = app(**to_query(spec(at)))
    assert figures(again) == figures(at), "the address names the ranks"


def test_a_step_that_ran_with_a_policy_is_drawn_with_it(app: App, store: Store, tmp_path: Path) -> None:
    at, run = app(), recorded(Policy.recompute(["0", "1", "2"]))
    opened_on(at, run, store, tmp_path)
    assert at.session_state["draft"].spec.policy == Policy.recompute(["0", "1", "2"])
    assert figures(at)["Step peak"].startswith(mib(run.peak_bytes).split()[0])
    say(at, on=[])
    whole = Forecaster(run.measurement, run.measurement.graph).baseline
    assert whole is not None and whole.step_peak_bytes is not None and whole.step_peak_bytes > run.peak_bytes


def test_a_link_restores_it_where_the_run_is_stored(app: App, worker: FakeWorker, store: Store, tmp_path: Path) -> None:
    run = recorded()
    store.import_file(run.save(tmp_path / "step.explorer").read_bytes())
    at = app(**to_query(run.measurement.spec))
    assert figures(at)["Step peak"] == mib(run.peak_bytes) and not runs(worker)


def test_a_link_to_a_run_that_is_not_here_is_one_sentence(app: App) -> None:
    assert "recorded in a script" in texts(app(**to_query(recorded().measurement.spec)))


@pytest.mark.parametrize("in_step", [1, 2], ids=["with its timeline", "with what was held"])
def test_a_step_that_memory_was_refused_in_opens(
    app: App, worker: FakeWorker, store: Store, tmp_path: Path, in_step: int
) -> None:
    model, path = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)), tmp_path / "oom.explorer"
    optimizer = torch.optim.SGD(model.parameters())
    refusal = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes."
    with pytest.raises(RuntimeError), explorer.watch(model, optimizer, on_oom=path):
        for step in range(1, 3):
            loss = model(torch.randn(512, 64)).square().mean()
            if step == in_step:
                raise RuntimeError(refusal)
            loss.backward()
            optimizer.step()
    at = app()
    n_jobs = len(worker.jobs)
    run_id = store.import_file(path.read_bytes())
    at.session_state[repository.OPENED] = ["explore", run_id]
    settle(at.run())
    assert len(worker.jobs) == n_jobs
    assert "4,194,304 bytes" in texts(at) and "Held then" in texts(at)
