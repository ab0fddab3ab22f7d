"""What stands in the controls of a page is what its records say, after any sequence of changes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streamlit.testing.v1 import AppTest

from explorer.record import Policy, RunSpec
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.draft import Draft
from tests import graphs
from tests.ui.fake_worker import FakeWorker
from tests.ui.page_driver import say, settle, texts, widget

App = Callable[..., AppTest]
SWITCHES = ("preserve_rng_state", "early_stop", "use_reentrant")
ON = {True: b"true", False: b"false"}
steps = st.one_of(
    st.tuples(st.just("switch"), st.sampled_from(SWITCHES)),
    st.tuples(st.just("optimizer"), st.sampled_from(["adamw", "sgd", "none"])),
    st.tuples(st.just("repeats"), st.integers(1, 9)),
    st.tuples(st.just("blocks"), st.integers(0, 5)),
    st.tuples(st.just("import"), st.booleans()),
    st.tuples(st.just("model"), st.sampled_from(["gpt", "unet"])),
    st.tuples(st.sampled_from(["undo", "redo"]), st.none()),
)


def spec(at: AppTest) -> RunSpec:
    drawn: RunSpec = at.session_state["draft"].spec
    return drawn


def do(at: AppTest, worker: FakeWorker, what: str, how: object) -> None:
    """One thing that a person does; what it must lead to is asserted where it is plain."""
    if what == "switch":
        now = widget(at, "toggle", f"option_{how}")
        wanted = not now.value
        now.set_value(wanted)
        settle(at.run())
        assert getattr(spec(at).policy, str(how)) is wanted
    elif what == "optimizer":
        settle(widget(at, "selectbox", "option_optimizer").set_value(how).run())
        assert spec(at).optimizer == how
    elif what == "repeats":
        settle(widget(at, "number_input", "option_n_repeats").set_value(how).run())
        assert spec(at).n_repeats == how
    elif what == "blocks":
        say(at, on=[worker.graph.chain[int(str(how))]])
    elif what == "import":
        text = b"version: 1\npolicy:\n  units: []\n  early_stop: " + ON[bool(how)] + b"\n"
        at.file_uploader(key="upload_policy").upload("policy.yaml", text)
        settle(at.run())
        assert spec(at).policy.early_stop is how
    elif what == "model":
        worker.graph = graphs.gpt(6) if how == "gpt" else graphs.unet()
        settle(widget(at, "selectbox", "model").set_value(f"sample_models/{how}.py").run())
        assert spec(at).model.target == f"sample_models/{how}.py"
    elif not at.button(key=what).disabled:
        settle(at.button(key=what).click().run())


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(happened=st.lists(steps, max_size=6))
def test_explore_shows_what_will_run(app: App, worker: FakeWorker, happened: list[tuple[str, object]]) -> None:
    worker.graph = graphs.gpt(6)
    at = app()
    for what, how in happened:
        do(at, worker, what, how)
        now = spec(at)
        assert {name: widget(at, "toggle", f"option_{name}").value for name in SWITCHES} == {
            name: getattr(now.policy, name) for name in SWITCHES
        }
        assert widget(at, "selectbox", "option_optimizer").value == now.optimizer
        assert widget(at, "number_input", "option_n_repeats").value == now.n_repeats
        assert widget(at, "selectbox", "model").value == now.model.target


def test_a_switch_follows_undo_and_answers_the_next_click(app: App, worker: FakeWorker) -> None:
    at = app()
    for what in (("switch", "preserve_rng_state"), ("switch", "preserve_rng_state"), ("undo", None)):
        do(at, worker, *what)
    assert widget(at, "toggle", "option_preserve_rng_state").value is False
    assert spec(at).policy.preserve_rng_state is False
    do(at, worker, "switch", "preserve_rng_state")
    assert spec(at).policy.preserve_rng_state is True


def test_undo_of_an_option_draws_the_controls_again() -> None:
    """They stand outside of the part of the page that a click on undo draws."""
    for redraws, policy in ((False, Policy.recompute(["head"])), (True, Policy(early_stop=False))):
        draft = Draft(spec=RunSpec(model=graphs.gpt(6).model))
        drafts._take_over(draft, policy)
        assert draft.redraw is redraws and draft.spec.policy == policy


def test_changed_options_are_named_where_they_follow_to_the_next_model(app: App, worker: FakeWorker) -> None:
    at = app()
    assert "changed options" not in texts(at)
    do(at, worker, "optimizer", "sgd")
    do(at, worker, "switch", "early_stop")
    assert r"optimizer sgd, early\_stop off" in texts(at)
    do(at, worker, "model", "unet")
    assert "optimizer sgd" in texts(at) and "early" not in texts(at)
