"""A policy leaves as a file with its evidence, and comes back in; what speaks against it is said."""

from __future__ import annotations

import pytest

from explorer.record import Policy
from explorer.ui.explore.files import policy_text, take_policy
from tests import graphs
from tests.ui.explore.visits import ALL, App, in_session, press, spec
from tests.ui.page_driver import figures, graph_data, say, settle, texts, widget


def test_the_policy_file_carries_evidence_of_exactly_this_policy(app: App) -> None:
    at = press(say(app(), on=ALL), "run")
    state, graph = at.session_state["explore"], graphs.gpt(6)
    from explorer.plan.policy import file as policy_file

    file = policy_file.loads(in_session(at, lambda: policy_text(state, graph)))
    assert file.policy == Policy.recompute(ALL)
    assert file.evidence is not None
    assert file.evidence.verdict == "bitwise equal"
    at = say(at, on=ALL[:2])
    file = policy_file.loads(in_session(at, lambda: policy_text(state, graph)))
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
    words = texts(at)
    assert "This cannot be used" in words and "This cannot run" not in words and "The last run" not in words


def test_a_policy_of_another_model_is_drawn_by_name_and_explained(app: App) -> None:
    at = app()
    state = at.session_state["explore"]
    text = "version: 1\nmodel: {target: x, fingerprint: '0000000000000000'}\npolicy: {units: [blocks.0]}\n"
    in_session(at, lambda: take_policy(state, graphs.gpt(6), text.encode()))
    assert state.job.failure is None and spec(at).policy == Policy.recompute(["blocks.0"])
    assert state.read is not None and "has changed since or is another one" in state.read.changed


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
