"""The page as a person uses it: model, policy, run, compare, export; with a worker that knows the answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.protocol import Compare, Describe, DrawAutograd, FindPlans, Measure, RunArena
from explorer.plan.catalogue import Sample
from explorer.plan.factory_arguments import FactoryArguments
from explorer.record import Comparison, Failure, ModelGraph, ModelRef, Policy, RunSpec
from explorer.ui.explore.blocks import take_matching
from explorer.ui.explore.files import policy_text, take_policy
from explorer.ui.session import address as link
from explorer.ui.session import backend
from explorer.ui.shared import draft as drafts
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import figures, graph_data, message, say, settle, texts, widget

App = Callable[..., AppTest]
ROOT = Path(__file__).resolve().parents[3]
ALL = [f"blocks.{i}" for i in range(6)]


def spec(at: AppTest) -> RunSpec:
    return at.session_state["draft"].spec


def start_only(**query: str) -> AppTest:
    """A new visitor, while a run is under way."""
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    for name, value in query.items():
        at.query_params[name] = value
    return at.run()


def press(at: AppTest, key: str) -> AppTest:
    return settle(at.button(key=key).click().run())


def test_the_first_visit_describes_and_measures_the_baseline_unasked(app: App, worker: FakeWorker) -> None:
    at = app()
    assert [type(job.request) for job in worker.jobs.values()] == [Describe, Measure, FindPlans]
    assert figures(at)["Step peak"] == "104.5 MiB"
    assert [row[0] for row in graph_data(at)["geometry"]["rows"]] == ["embedding", "dropout", "blocks", "norm", "head"]


def test_a_second_visitor_finds_the_measured_baseline(app: App, worker: FakeWorker) -> None:
    app()
    other = app()
    assert len(worker.jobs) == 3
    assert figures(other)["Step peak"] == "104.5 MiB"


def test_a_toggle_predicts_at_once_and_runs_nothing(app: App, worker: FakeWorker) -> None:
    at = say(app(), on=ALL)
    assert figures(at)["Step peak"] == "104.5 → ≈ 34.5 MiB"
    assert figures(at)["FLOPs"].startswith("≈ +")
    assert "predicted" in texts(at)
    assert not worker.of(Compare)


def test_a_toggle_and_every_preset_say_what_they_would_take_in_time(app: App) -> None:
    at = app()
    assert figures(at)["Step time"] == "102 ms"
    offered = at.get("menu_button")[0].proto.options
    assert "Keep all" in offered
    assert [title for title in offered if title.startswith("Recompute all: ≈ −67 % peak, ×2.0")], offered
    at = say(at, on=ALL)
    assert re.fullmatch(r"≈ ×2\.0\d ± 0\.\d\d", figures(at)["Step time"]), "predicted, with its interval"
    at = press(at, "run")
    assert figures(at)["Step time"].startswith("×1.") and "±" in figures(at)["Step time"]
    shorter = figures(say(at, on=ALL[:5]))["Step time"]
    assert float(shorter.split()[1][1:]) < 1.6, "a whole step that was measured says what the next policy will take"


def test_a_policy_that_nobody_ran_is_dashed_over_the_measured_line(app: App) -> None:
    def foretold(at: AppTest) -> bool:
        return any("drawn policy, predicted" in chart.proto.spec for chart in at.get("plotly_chart"))

    at = app()
    assert at.get("plotly_chart") and not foretold(at)
    at = say(at, on=ALL)
    assert foretold(at)
    at = press(at, "run")
    assert not foretold(at)
    assert foretold(say(at, on=ALL[:2]))


def test_run_measures_and_compares(app: App, worker: FakeWorker) -> None:
    at = press(say(app(), on=ALL), "run")
    assert figures(at)["Step peak"] == "104.5 → 34.5 MiB"
    assert figures(at)["Gradients"] == "bitwise equal"
    assert figures(at)["Recomputed"] == "6 of 6 blocks"
    (job,) = worker.of(Compare)
    assert job.request.baseline.policy == Policy()
    assert job.request.candidate.policy == Policy.recompute(ALL)
    assert graph_data(at)["labels"]["blocks"][0] == "15.0 → 0.5 MiB each"


def test_figures_of_an_older_policy_are_never_silently_wrong(app: App) -> None:
    at = press(say(app(), on=ALL), "run")
    at = say(at, on=ALL[:3])
    assert "≈" in figures(at)["Step peak"]
    assert "before: 104.5 → 34.5 MiB" in texts(at)
    assert "for the previous policy" in texts(at)
    assert figures(at)["Gradients"] == "not compared"
    back = say(at, on=ALL)
    assert figures(back)["Step peak"] == "104.5 → 34.5 MiB"
    assert "previous policy" not in texts(back)


def test_one_run_is_stacked_by_role_or_by_block(app: App) -> None:
    at = app()
    for stacked, words in ((False, "Stacked area chart of bytes by role"), (True, "bytes by block, recompute on top")):
        at = settle(widget(at, "toggle", "memory_by_block").set_value(stacked).run())
        assert any(words in chart.proto.alt for chart in at.get("plotly_chart"))


def test_undo_and_redo_walk_through_clicks_and_presets(app: App) -> None:
    at = say(app(), on=["head"])
    at.session_state["presets"] = "all"
    graph = graphs.gpt(6)
    drafts.set_policy(at.session_state["draft"], Policy.recompute(ALL), graph)
    at.run()
    assert spec(at).policy == Policy.recompute(ALL)
    at = press(at, "undo")
    assert graph_data(at)["on"] == ["head"]
    at = press(at, "undo")
    assert graph_data(at)["on"] == []
    at = press(press(at, "redo"), "redo")
    assert graph_data(at)["on"] == ALL
    assert graph_data(at)["revision"] > 0


@pytest.mark.parametrize(
    ("pressed", "marked", "undone"), [(False, ["blocks.1", "head"], ["head"]), (True, ["head"], [])]
)
def test_a_click_in_the_rerun_of_undo_counts_in_its_order(
    app: App, pressed: bool, marked: list[str], undone: list[str]
) -> None:
    """Undo and a click on blocks.1 at once: undo takes back what was before it, or the click if that came first."""
    at = say(app(), on=["head"])
    if not pressed:
        at = say(at, on=["head", "norm"])
    on = [*graph_data(at)["on"], "blocks.1"]
    at.session_state[at.session_state["draft"].widget] = message(at, pressed=pressed, on=on)
    at = press(at, "undo")
    assert graph_data(at)["on"] == marked
    assert graph_data(press(at, "undo"))["on"] == undone


def test_a_policy_file_and_a_click_in_one_rerun_both_count(app: App) -> None:
    at = say(app(), on=["head"])
    at.session_state[at.session_state["draft"].widget] = message(at, on=["head", "norm"])
    at.file_uploader(key="upload_policy").upload("policy.yaml", b"version: 1\npolicy:\n  units: [blocks.0]\n")
    at = settle(at.run())
    assert graph_data(at)["on"] == ["blocks.0", "norm"]


def test_a_run_pressed_while_something_runs_starts_nothing(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=ALL)
    at.button(key="run").click().run()
    at.session_state["explore"].job.asked = True
    at.run()
    assert len(worker.of(Compare)) == 1


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


def test_a_refresh_finds_its_run_again(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=ALL)
    at.button(key="run").click().run()
    (job,) = worker.of(Compare)
    query = link.to_query(spec(at)) | {"job": job.id}
    assert at.query_params["job"] in (job.id, [job.id])
    again = start_only(**query)
    assert again.button(key="run").disabled
    worker.answer(job)
    settle(again)
    assert figures(again)["Step peak"] == "104.5 → 34.5 MiB"
    assert "job" not in again.query_params


def test_cancel_is_a_result(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=ALL)
    at.button(key="run").click().run()
    at = press(at, "cancel")
    assert worker.of(Compare)[0].cancelled
    assert "Cancelled" in texts(at)
    assert not at.button(key="run").disabled


@pytest.mark.parametrize(
    "kind", ["out of memory", "crash", "time-out", "model raised", "bad input", "not on this device", "internal"]
)
def test_a_failure_is_a_result_and_the_page_lives_on(app: App, worker: FakeWorker, kind: str) -> None:
    worker.fail_with = Failure(
        kind=kind,  # type: ignore[arg-type]
        sentence="Asked for the moon in <b>**blocks.3**</b>.",
        hint="Take less.",
        traceback="Traceback: line 1",
        asked_bytes=2**30,
        free_bytes=2**20,
    )
    at = press(say(app(), on=ALL), "run")
    assert "Asked for the moon in <b>**blocks.3**</b>." in [text.value for text in at.text]
    assert "Take less." in texts(at)
    assert at.code[0].value == "Traceback: line 1"
    worker.fail_with = None
    at = press(at, "run")
    assert figures(at)["Gradients"] == "bitwise equal"
    assert "Asked for the moon" not in texts(at)


def test_a_worker_that_forgot_the_job_is_said(app: App, worker: FakeWorker) -> None:
    worker.slow = True
    at = say(app(), on=ALL)
    at.button(key="run").click().run()
    worker.jobs.clear()
    assert "The app was restarted" in texts(settle(at))


def test_options_change_the_run_and_make_figures_stale(app: App) -> None:
    at = press(say(app(), on=ALL), "run")
    widget(at, "selectbox", "option_optimizer").select("sgd").run()
    widget(at, "toggle", "option_early_stop").set_value(False).run()
    at = settle(at)
    assert spec(at).optimizer == "sgd"
    assert spec(at).policy == Policy.recompute(ALL, early_stop=False)
    assert "for the previous policy" in texts(at)


def test_another_model_starts_afresh(app: App, worker: FakeWorker) -> None:
    at = press(say(app(), on=ALL), "run")
    worker.graph = graphs.unet()
    widget(at, "selectbox", "model").select("sample_models/unet.py").run()
    at = settle(at)
    assert spec(at).model == ModelRef(target="sample_models/unet.py", size="small")
    assert not spec(at).policy.units
    assert graph_data(at)["on"] == []
    assert [row[0] for row in graph_data(at)["geometry"]["rows"]][:2] == ["down0", "down1"]


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


def test_the_policy_file_carries_evidence_of_exactly_this_policy(app: App) -> None:
    at = press(say(app(), on=ALL), "run")
    state, graph = at.session_state["explore"], graphs.gpt(6)
    from explorer.plan.policy import file as policy_file

    file = policy_file.loads(_in_session(at, lambda: policy_text(state, graph)))
    assert file.policy == Policy.recompute(ALL)
    assert file.evidence is not None
    assert file.evidence.verdict == "bitwise equal"
    at = say(at, on=ALL[:2])
    file = policy_file.loads(_in_session(at, lambda: policy_text(state, graph)))
    assert file.policy == Policy.recompute(ALL[:2])
    assert file.evidence is None


def test_a_policy_file_comes_back_in(app: App) -> None:
    at = app()
    graph = graphs.gpt(6)
    text = "version: 1\npolicy:\n  units: [blocks.0, blocks.4]\n"
    at.file_uploader(key="upload_policy").upload("policy.yaml", text.encode())
    at = settle(at.run())
    assert graph_data(at)["on"] == ["blocks.0", "blocks.4"]
    assert press(at, "undo") and graph_data(at)["on"] == []
    assert graph.fingerprint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"version: 9\npolicy: {}",
        b"version: 1\npolicy: {unitz: []}",
        b"version: 1\npolicy: {units: [nope]}",
        b"a: !!python/object:os.system",
    ],
    ids=["empty", "no text", "future", "unknown field", "unknown block", "code"],
)
def test_a_policy_file_that_is_wrong_changes_nothing(app: App, data: bytes) -> None:
    at = say(app(), on=["head"])
    at.file_uploader(key="upload_policy").upload("policy.yaml", data)
    at = settle(at.run())
    assert graph_data(at)["on"] == ["head"]
    assert "This cannot run" in texts(at)


def test_a_policy_of_another_model_is_drawn_by_name_and_explained(app: App) -> None:
    at = app()
    state = at.session_state["explore"]
    text = "version: 1\nmodel: {target: x, fingerprint: '0000000000000000'}\npolicy: {units: [blocks.0]}\n"
    _in_session(at, lambda: take_policy(state, graphs.gpt(6), text.encode()))
    assert state.job.failure is None and spec(at).policy == Policy.recompute(["blocks.0"])
    assert state.read is not None and "has changed since or is another one" in state.read.changed


def test_a_selected_block_and_search(app: App) -> None:
    at = say(app(), selected="norm")
    assert graph_data(at)["selected"] == "norm"
    at.selectbox(key="search").select("blocks.3.mlp").run()
    at = settle(at)
    assert {"blocks", "blocks.3"} <= set(graph_data(at)["open"])
    assert graph_data(at)["jump"]["id"] == "blocks.3.mlp"


def test_an_autograd_graph_is_drawn_on_request(app: App, worker: FakeWorker) -> None:
    at = app()
    at.session_state["tabs"] = "Autograd"
    at = settle(at.run())
    at = press(at, "draw")
    (job,) = worker.of(DrawAutograd)
    assert job.request.block == "blocks.0"
    assert at.get("graphviz_chart") or "blocks.0 kept" in texts(at)


@pytest.mark.parametrize("tab", ["Memory", "Cost", "Gradients", "Blocks", "Autograd", "Arena"])
@pytest.mark.parametrize("measured", [False, True])
def test_every_tab_stands_before_and_after_a_run(app: App, tab: str, measured: bool) -> None:
    at = app()
    if measured:
        at = press(say(at, on=ALL), "run")
    at.session_state["tabs"] = tab
    settle(at.run())


def test_names_from_a_model_never_become_markup(app: App, worker: FakeWorker) -> None:
    worker.graph = graphs.hostile()
    at = app()
    assert not any("onerror" in str(shown.value) for shown in (*at.markdown, *at.caption))  # a plain text may say it
    assert any("onerror" in row[0] for row in graph_data(at)["geometry"]["rows"])
    at.session_state["tabs"] = "Gradients"
    at = press(settle(at.run()), "run")
    assert not any("<script>" in str(markdown.value) for markdown in at.markdown)


def _in_session(at: AppTest, act: Callable[[], object]) -> object:
    """Calls `act` as a callback of the page would be: the worker and store of this app are patched already."""
    return act()


def test_a_run_without_measurable_figures_says_not_measured(
    app: App, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = graphs.measured

    def bare(graph: object, spec: RunSpec) -> object:
        return msgspec.structs.replace(whole(graph, spec), allocations=None, times=None, phases=())  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "measured", bare)
    at = app()
    assert figures(at)["Step peak"] == "not measured"
    assert figures(at)["Step time"] == "not measured"


def test_a_refresh_during_a_run_still_shows_the_baseline(app: Callable[..., AppTest], worker: FakeWorker) -> None:
    worker.slow = True
    at = app()
    at.button(key="run").click().run()
    (job,) = worker.of(Compare)
    again = start_only(model="sample_models/gpt.py", size="small", job=job.id)
    assert figures(again)["Step peak"] == "104.5 MiB"


def test_a_baseline_from_before_the_options_changed_says_so(app: Callable[..., AppTest]) -> None:
    at = app()
    assert "for other options" not in texts(at)
    widget(at, "selectbox", "option_dtype").set_value("float64").run()
    assert "for other options" in texts(at)


def test_a_run_that_was_cut_short_is_never_a_win(app: App, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the strip, the graph, in the tabs, in the file and at the bottom."""
    whole = graphs.compared
    raised = Failure(kind="model raised", sentence="The model raised CheckpointError.")

    def cut(graph: ModelGraph, spec: RunSpec) -> Comparison:
        pair = whole(graph, spec)
        candidate = msgspec.structs.replace(pair.candidate, phases=pair.candidate.phases[:-1], failure=raised)
        return msgspec.structs.replace(pair, candidate=candidate, gradients=(), failure=raised)

    monkeypatch.setattr(graphs, "compared", cut)
    at = press(say(app(), on=ALL), "run")
    strip = figures(at)
    assert strip["Step peak"] == "at least 34.5 MiB"
    assert strip["FLOPs"] == strip["Step time"] == strip["Saved after forward"] == "not measured"
    assert strip["Gradients"] == "not comparable"
    assert not any("→" in figure for figure in strip.values())
    assert "failed" in texts(at) and "Why" not in texts(at) and "Measured." not in texts(at)
    assert graph_data(at)["labels"]["blocks"][0].startswith("15.0 → ≈")
    text = _in_session(at, lambda: policy_text(at.session_state["explore"], graphs.gpt(6)))
    assert isinstance(text, str) and "evidence" not in text
    for tab in ("Cost", "Gradients", "Blocks"):
        at.session_state["tabs"] = tab
        settle(at.run())
    assert worker.store.list()[0].headlines["comparable"] is False


def test_what_is_known_to_go_wrong_is_said_before_the_run(app: App) -> None:
    """In the strip, beside Run and in the file: without its generator put back, dropout is drawn anew."""
    at = say(app(), on=ALL)
    assert figures(at)["Gradients"] == "not compared" and not at.error
    settle(widget(at, "toggle", "option_preserve_rng_state").set_value(False).run())
    assert figures(at)["Gradients"] == "not safe"
    assert len(at.error) == 2 and all("preserve" in error.value for error in at.error)
    assert graph_data(at)["labels"]["blocks"][2][0][0] == "✕"
    written = policy_text(at.session_state["explore"], graphs.gpt(6))
    assert written.startswith("# WARNING") and "other random numbers" in written.splitlines()[2]
    at = press(at, "undo")
    assert figures(at)["Gradients"] == "not compared" and not at.error


def test_a_file_whose_own_evidence_speaks_against_it_says_so(app: App) -> None:
    at = app()
    text = "version: 1\npolicy: {units: [blocks.0]}\nevidence: {device: a, torch_version: '2', verdict: different}\n"
    at.file_uploader(key="upload_policy").upload("policy.yaml", text.encode())
    at = settle(at.run())
    assert graph_data(at)["on"] == ["blocks.0"]
    assert "evidence in this policy file says" in texts(at)
    assert "evidence in this policy file" not in texts(press(at, "run"))


def test_the_arena_asks_for_what_was_chosen_and_shows_what_came(app: App, worker: FakeWorker) -> None:
    at = app()
    at.session_state["tabs"] = "Arena"
    at = settle(at.run())
    at.button(key="arena_run").click().run()
    (job,) = worker.of(RunArena)
    assert job.request.shares == (0.5, 0.7) and "explorer" in job.request.only
    assert "compile-budget" not in job.request.only
    at = settle(at.run())
    assert "Rotor at 50 %: did not run: It plans chains." in texts(at)
    assert not at.exception


def test_a_pattern_recomputes_all_that_it_matches(app: App, worker: FakeWorker) -> None:
    """Typed into the search box: AppTest itself can only choose what a box offers."""
    at = app()
    assert at.selectbox(key="search").placeholder == "Search, or blocks.*.mlp"
    take_matching(at.session_state["explore"], worker.graph, "blocks.*")
    at = settle(at.run())
    assert spec(at).policy.blocks == tuple(ALL)
    take_matching(at.session_state["explore"], worker.graph, "blocks.*.nothing")
    at = settle(at.run())
    assert "No block matches" in texts(at) and spec(at).policy.blocks == tuple(ALL)
