"""The Explore page as a person uses it: address, model, options, clicks, undo, search, and windows of other sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from streamlit.commands.page_config import _get_favicon_string
from streamlit.testing.v1 import AppTest
from torch import nn

import explorer
from explorer import slices
from explorer.jobs.protocol import FindPlans, Measure
from explorer.jobs.run_file import open_files, stored_record, write
from explorer.jobs.store import Store
from explorer.own_loop.record_step import RecordedStep
from explorer.plan.catalogue import FactoryArguments, Sample
from explorer.plan.predict.forecaster import Forecaster, prices
from explorer.record import Measurement, ModelGraph, ModelRef, Policy
from explorer.record.plan import Price
from explorer.ui.navigation import TAB_ICON
from explorer.ui.session import backend, repository
from explorer.ui.session.address import to_query
from explorer.view.drawing.units import mib
from explorer.view.text import explore as glossary
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import (
    ALL,
    GRAPH,
    WINDOW,
    App,
    figures,
    graph_data,
    open_tab,
    press,
    say,
    settle,
    spec,
    take,
    texts,
    tools,
    widget,
)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({"model": "sample_models/gpt.py", "run": "YWJj"}, "cannot be read"),
        ({"model": "/etc/passwd.py:evil"}, "/etc/passwd.py:evil is not offered here"),
    ],
)
def test_a_broken_or_foreign_link_says_so(app: App, worker: FakeWorker, query: dict[str, str], reason: str) -> None:
    at = app(**query)
    assert reason in texts(at) and figures(at)["Step peak"] == "104.5 MiB"
    assert all(job.request.spec.model.target == "sample_models/gpt.py" for job in worker.of(Measure))


def test_the_name_in_a_link_is_text_and_no_markup(app: App, worker: FakeWorker) -> None:
    name = "![seen](http://elsewhere/seen.png) **bold** :red[x] <b>.py:make"
    at = app(model=name)
    shown = [
        element.value for element in (*at.error, *at.warning, *at.info, *at.markdown) if "elsewhere" in element.value
    ]
    assert shown and name in texts(at)
    assert not [text for text in shown if any(sign in text for sign in ("![", "](", " **bold", " :red[", " <b>"))]


def test_a_click_prices_the_drawn_blocks_alone_and_once(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices of all blocks of a large model take seconds."""
    priced: list[str] = []

    def counted(run: Measurement, blocks: list[str], *, graph: ModelGraph) -> tuple[Price, ...]:
        priced.extend(blocks)
        return prices(run, blocks, graph=graph)

    monkeypatch.setattr("explorer.ui.explore.view.prices", counted)
    at = app()
    first = list(priced)
    assert first and len(first) < len(GRAPH.blocks) and len(set(first)) == len(first)
    say(at, open=["blocks"])
    assert len(priced) > len(first) and len(set(priced)) == len(priced)


def test_a_size_and_its_numbers_belong_to_the_model(app: App) -> None:
    at = app()
    pages = at.session_state["pages"]
    names = ["explore", *sorted(slices.names(), reverse=True), "runs"]
    assert [page.title.lower() for page in pages.values()] == list(pages) == names
    assert [page.url_path for page in pages.values()] == ["", *names[1:]]
    assert _get_favicon_string(TAB_ICON).startswith("data:image/svg+xml"), "no server is asked for the tab's picture"
    at = settle(widget(at, "selectbox", "size").select("gpu").run())
    assert spec(at).model == ModelRef(target="sample_models/gpt.py", size="gpu")
    widget(at, "number_input", "argument_n_layers").set_value(3)
    at = settle(at.button(key="FormSubmitter:arguments_form-Use these").click().run())
    assert spec(at).model.arguments == {"n_layers": 3}
    widget(at, "number_input", "argument_dropout").set_value(0.2)
    at = settle(at.button(key="FormSubmitter:arguments_form-Use these").click().run())
    assert spec(at).model.arguments == {"n_layers": 3, "dropout": 0.2}, "what was changed before stays"


def test_numbers_switches_and_choices_of_a_factory_are_changed(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Sample(
        name="net",
        target="nets.py:build",
        title="A net",
        lesson="",
        sizes={"small": {"width": 8}},
        arguments=FactoryArguments(
            usual={"width": 4, "bias": True, "norm": "layer", "shift": -1, "dropout": 0.1, "epsilon": 1e-5},
            choices={"norm": ("layer", "batch")},
        ),
    )
    monkeypatch.setattr(backend, "samples", lambda: (own,))
    at = app()
    assert widget(at, "number_input", "argument_width").value == 8, "the size's number, over the factory's"
    assert widget(at, "number_input", "argument_dropout").max == 1
    widget(at, "checkbox", "argument_bias").set_value(False)
    widget(at, "selectbox", "argument_norm").set_value("batch")
    widget(at, "number_input", "argument_shift").set_value(-3)
    at.button(key="FormSubmitter:arguments_form-Use these").click().run()
    assert spec(settle(at)).model.arguments == {"bias": False, "norm": "batch", "shift": -3}


def test_names_from_a_model_never_become_markup(app: App, worker: FakeWorker) -> None:
    worker.graph = graphs.hostile()
    at = app()
    assert not any("onerror" in str(shown.value) for shown in (*at.markdown, *at.caption))  # a plain text may say it
    assert any("onerror" in row[0] for row in graph_data(at)["geometry"]["rows"])
    at = press(open_tab(at, "Gradients"), "run")
    assert not any("<script>" in str(markdown.value) for markdown in at.markdown)


@pytest.mark.parametrize("n_blocks", [0, 4])
def test_a_model_whose_presets_choose_nothing_is_drawn_and_run(app: App, worker: FakeWorker, n_blocks: int) -> None:
    """tests/browser/test_plain_models.py opens the tabs of such models, and their guided path."""
    worker.graph = graphs.single_operations(n_blocks)
    at = app()
    assert tools(at).get("presets") == ([["keep-all", "Keep all"]] if n_blocks else None)
    assert (glossary.NO_BLOCKS in texts(at)) == (n_blocks == 0)
    if n_blocks:
        at = press(say(at, on=["layer0"]), "run")
        assert figures(at)["Gradients"] == "bitwise equal"


def test_blocks_are_selected_searched_and_matched_by_a_pattern(app: App, worker: FakeWorker) -> None:
    at = say(app(), selected="norm")
    assert graph_data(at)["selected"] == "norm"
    say(at, selected="")
    assert "blocks.3.mlp" in tools(at)["names"]
    at = take(at, {"kind": "jump", "ids": ["blocks.3.mlp"]})
    assert {"blocks", "blocks.3"} <= set(graph_data(at)["open"])
    assert graph_data(at)["jump"]["id"] == "blocks.3.mlp"
    at = take(at, {"kind": "match", "ids": ["blocks.*"]})
    assert spec(at).policy.blocks == ALL
    at = take(at, {"kind": "match", "ids": ["blocks.*.nothing"]})
    assert "No block matches" in texts(at) and spec(at).policy.blocks == ALL
    assert "No block matches" not in texts(take(at, {"kind": "preset", "ids": ["all"]}))


def n_charts(at: AppTest) -> int:
    return len(at.get("plotly_chart"))


def tell(at: AppTest, height: int, *, narrow: bool = False) -> AppTest:
    """The graph stands, and says what it sees."""
    at.session_state[at.session_state["draft"].widget] = {"window": {"height": height, "narrow": narrow}}
    return settle(at.run())


@pytest.fixture
def stranger(app: App) -> AppTest:
    """A visitor whose browser has said nothing yet."""
    app()
    at = app()
    del at.session_state["window"], at.session_state["plotly"]
    return at.run()


def test_a_new_visitor_sees_graph_and_charts_that_are_then_laid_out_for_the_window(stranger: AppTest) -> None:
    assert n_charts(stranger) == 0 and len(figures(stranger)) == 6, "a sketch stands until Plotly's file has run"
    usual = graph_data(stranger)["height"]
    assert graph_data(stranger)["window"] == {"height": 800, "narrow": False, "known": False}
    at = tell(stranger, 812)
    assert n_charts(at) == 0
    at.session_state["plotly"] = True
    assert n_charts(at.run()) == 2
    assert graph_data(at)["window"] == {"height": 800, "narrow": False, "known": True}
    for height, more in ((1075, 260), (5000, 800), (300, 0)):
        assert graph_data(tell(at, height))["height"] == usual + more
    n_columns = len(at.columns)
    assert len(tell(at, 800, narrow=True).columns) < n_columns
    assert len(tell(at, 800).columns) == n_columns


def test_a_click_in_the_message_of_the_window_counts(stranger: AppTest) -> None:
    """Streamlit hands both states of the graph over in one rerun."""
    at = say(stranger, on=["blocks.3"])
    widget_key = at.session_state["draft"].widget
    at.session_state[widget_key] = {**at.session_state[widget_key], "window": WINDOW}
    at = settle(at.run())
    assert n_charts(at) == 2 and graph_data(at)["on"] == ["blocks.3"]
    assert len(at.dataframe) == 0
    for opened in (True, False):
        at.session_state["ledger_twin"] = opened
        tables = settle(at.run()).dataframe
        assert len(tables) == opened and all(table.value["bytes"].sum() > 0 for table in tables), "made when unfolded"


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


def test_every_tab_is_drawn_and_nothing_runs(app: App, worker: FakeWorker, store: Store, tmp_path: Path) -> None:
    run = recorded()
    at = app(**to_query(run.measurement.spec))
    assert "recorded in a script" in texts(at), "the run is not here"
    n_jobs = len(runs(worker))
    opened_on(at, run, store, tmp_path)
    linked = app(**to_query(run.measurement.spec))
    assert figures(linked)["Step peak"] == mib(run.peak_bytes), "a link restores it where the run is stored"
    assert len(runs(worker)) == n_jobs
    assert at.button(key="run").disabled and not [one for one in at.selectbox if one.label == "dtype"]
    assert run.measurement.recorded_in in texts(at) and "model is not here" in texts(at)
    assert [row[0] for row in graph_data(at)["geometry"]["rows"]] == ["0", "1", "2", "3"]
    assert figures(at)["Step peak"] == mib(run.peak_bytes)
    assert "recorded" in texts(at)
    assert all(reason in texts(at) for reason in run.why())
    say(at, on=["0", "1"])
    forecast = Forecaster(run.measurement, run.measurement.graph).forecast(Policy.recompute(["0", "1"]))
    assert figures(at)["Step peak"].endswith(f"≈ {mib(forecast.step_peak_bytes)}")
    assert forecast.step_peak_bytes is not None and forecast.step_peak_bytes < run.peak_bytes
    for tab in ("Cost", "Gradients", "Autograd"):
        assert "model is not here" in texts(open_tab(at, tab))
    for name, part in slices.parts("ui.page").items():
        if name == "pipeline":
            split = AppTest.from_string(f"import {part.__name__} as pipeline\npipeline.page()\n", default_timeout=60)
            split.session_state["draft"] = at.session_state["draft"]
            split.run()
            assert not split.exception and "model is not here" in texts(split)


def test_files_of_ranks_open_as_their_fullest_rank(app: App, worker: FakeWorker, store: Store) -> None:
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
    assert "train.py:7, step 2" in texts(at) and at.button(key="run").disabled
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


@pytest.mark.parametrize("in_step", [1, 2], ids=["with its timeline", "with what was held"])
def test_a_refused_step_opens(app: App, worker: FakeWorker, store: Store, tmp_path: Path, in_step: int) -> None:
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
