"""The page as a person uses it: model, policy, run, compare, export; with a worker that knows the answers."""

from __future__ import annotations

import pytest

from explorer.jobs.protocol import Describe
from explorer.plan.catalogue import FactoryArguments, Sample
from explorer.record import ModelRef, Policy
from explorer.ui.explore.results import TABS
from explorer.ui.session import backend
from explorer.view.text import explore as glossary
from explorer.view.text.lab import STEPS
from tests import graphs
from tests.ui.explore.visits import ALL, App, press, spec
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, graph_data, say, settle, texts, widget


def test_the_address_restores_model_policy_and_options(app: App) -> None:
    at = say(app(), on=["blocks.1", "blocks.2"])
    query = {name: value[0] if isinstance(value, list) else value for name, value in at.query_params.items()}
    again = app(**query)
    assert spec(again) == spec(at)
    assert graph_data(again)["on"] == ["blocks.1", "blocks.2"]


def test_a_broken_link_says_so_and_the_page_works(app: App) -> None:
    at = app(model="sample_models/gpt.py", run="YWJj")
    assert "cannot be read" in texts(at)
    assert figures(at)["Step peak"] == "104.5 MiB"


def test_a_link_cannot_name_a_model_that_is_not_offered(app: App, worker: FakeWorker) -> None:
    at = app(model="/etc/passwd.py:evil")
    assert all(job.request.model.target == "sample_models/gpt.py" for job in worker.of(Describe))
    assert "is not offered here" in texts(at)
    assert r"/etc/passwd\.py\:evil" in texts(at)  # as it is, not as markup


def test_options_change_the_run_and_make_figures_stale(app: App) -> None:
    at = press(say(app(), on=ALL), "run")
    widget(at, "selectbox", "option_optimizer").select("sgd").run()
    widget(at, "toggle", "option_early_stop").set_value(False).run()
    at = settle(at)
    assert spec(at).optimizer == "sgd"
    assert spec(at).policy == Policy.recompute(ALL, early_stop=False)
    assert "for the previous policy" in texts(at)


def test_a_size_and_its_numbers_belong_to_the_model(app: App) -> None:
    at = app()
    widget(at, "selectbox", "size").select("gpu").run()
    at = settle(at)
    assert spec(at).model == ModelRef(target="sample_models/gpt.py", size="gpu")
    widget(at, "number_input", "argument_n_layers").set_value(3)
    at.button(key="FormSubmitter:arguments_form-Use these").click().run()
    at = settle(at)
    assert spec(at).model.arguments == {"n_layers": 3}
    widget(at, "number_input", "argument_dropout").set_value(0.2)
    at.button(key="FormSubmitter:arguments_form-Use these").click().run()
    at = settle(at)
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
    at.session_state["tabs"] = "Gradients"
    at = press(settle(at.run()), "run")
    assert not any("<script>" in str(markdown.value) for markdown in at.markdown)


@pytest.mark.parametrize("n_blocks", [0, 1, 4])
def test_a_model_whose_presets_choose_nothing_has_every_tab_and_the_guided_path(
    app: App, worker: FakeWorker, n_blocks: int
) -> None:
    worker.graph = graphs.single_operations(n_blocks)
    at = app()
    assert next(menu for menu in at.get("menu_button") if "presets" in menu.proto.id).proto.options == ["Keep all"]
    at = press(at, "tour_begin")
    for step in STEPS[:4]:
        assert f"**{step.title}**" in texts(at)
        at = press(at, "tour_next")
    for tab in TABS:
        at.session_state["tabs"] = tab
        at = settle(at.run())
    assert [tab.label for tab in at.tabs] == TABS
    assert (glossary.NO_BLOCKS in texts(at)) == (n_blocks == 0)
    if n_blocks:
        at = press(say(at, on=["layer0"]), "run")
        assert figures(at)["Gradients"] == "bitwise equal"
