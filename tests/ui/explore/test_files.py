"""A policy leaves as a file with its evidence, or for another program; policies and settings come in."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.errors import ExplorerError
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.policy import file as policy_file
from explorer.record import Policy
from explorer.ui.explore.files import policy_text, take_policy
from explorer.view.text.plan import export_sentences
from tests import graphs
from tests.ui.page_driver import ALL, GRAPH, App, figures, graph_data, press, say, settle, spec, texts, upload, widget

SOME = ["blocks.1", "blocks.3"]


def test_the_policy_file_carries_evidence_of_exactly_this_policy(app: App) -> None:
    at = press(say(app(), on=list(ALL)), "run")
    state = at.session_state["explore"]
    file = policy_file.loads(policy_text(state, GRAPH))
    assert file.policy == Policy.recompute(ALL)
    assert file.evidence is not None and file.evidence.verdict == "bitwise equal"
    say(at, on=list(ALL[:2]))
    file = policy_file.loads(policy_text(state, GRAPH))
    assert file.policy == Policy.recompute(ALL[:2]) and file.evidence is None


@pytest.mark.parametrize("target", FORMATS)
def test_every_target_answers_in_sentences(target: str) -> None:
    file = policy_file.file_of(Policy.recompute(SOME), GRAPH)
    if target in ("stages", "schedule", "megatron-layout"):
        with pytest.raises(ExplorerError, match="holds no pipeline plan"):
            exported(file, target)
        return
    form = exported(file, target)
    assert export_sentences(form)[0].startswith("It recomputes " if form.fit != "not expressible" else form.reasons[0])
    refused = replace(form, fit="not expressible", recomputed=(), reasons=("Why not.",), notes=())
    assert export_sentences(refused) == ["Why not."]
    assert export_sentences(replace(refused, fit="exact", recomputed=("",)))[0] == "It recomputes the model."


def test_what_a_target_really_does_is_drawn_and_undone(app: App) -> None:
    """Megatron's flags name the first layers of a stage: they cannot skip one."""
    at = settle(say(app(), on=SOME).selectbox(key="export_target").set_value("stages").run())
    assert "holds no pipeline plan" in texts(at)
    at = settle(at.selectbox(key="export_target").set_value("megatron").run())
    assert "badge[approximated]" in texts(at)
    at = press(at, "draw_export")
    assert graph_data(at)["on"] == ["blocks.0", "blocks.1"]
    assert graph_data(press(at, "undo"))["on"] == SOME


def test_a_file_that_is_wrong_changes_nothing_and_a_right_one_is_undone(app: App) -> None:
    at = say(app(), on=["head"])
    for data in (
        b"",
        b"\xff\xfe",
        b"version: 9\npolicy: {}",
        b"version: 1\npolicy: {unitz: []}",
        b"version: 1\npolicy: {units: [nope]}",
        b"a: !!python/object:os.system",
        b"gradient_checkpointing: true\nrecompute_granularity: full\n",
    ):
        at = upload(at, data)
        assert graph_data(at)["on"] == ["head"], data
        shown = texts(at)
        assert "This cannot be used" in shown and "This cannot run" not in shown and "The last run" not in shown
    assert "those of transformers (gradient_checkpointing) and of Megatron-LM (recompute_granularity)" in shown
    at = upload(at, "version: 1\npolicy:\n  units: [blocks.0, blocks.4]\n")
    assert graph_data(at)["on"] == ["blocks.0", "blocks.4"]
    assert graph_data(press(at, "undo"))["on"] == ["head"]


def test_settings_of_a_program_are_drawn_and_their_notes_stay_until_read(app: App) -> None:
    at, other = app(), policy_file.dumps(policy_file.file_of(Policy.recompute(ALL[:1]), graphs.gpt(4)))
    megatron = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    for name, text, chosen, note in (
        ("t.toml", '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"', ALL[1::2], "exact"),
        ("args.sh", megatron, ALL[:2], "exact"),
        ("a.json", '{"gradient_checkpointing": true}', ALL, "has no layer of transformers; counted instead"),
        ("policy.yaml", "version: 1\npolicy: {units: [blocks.*]}", ALL, "blocks.* stands for 6 units"),
        ("other.yaml", other, ALL[:1], "blocks.* are 6, and were 4"),
    ):
        at = upload(at, text, name)
        assert graph_data(at)["on"] == list(chosen)
        shown = texts(at).replace("\\", "")
        assert "read from" in shown and note in shown
        at = press(at, "read_understood")
        assert "read from" not in texts(at) and graph_data(at)["on"] == list(chosen)
    at = upload(at, policy_file.dumps(policy_file.file_of(Policy.recompute(ALL[:2]), GRAPH)))
    assert graph_data(at)["on"] == list(ALL[:2]) and "read from" not in texts(at), "what fits needs no words"


def test_a_policy_of_another_model_is_drawn_by_name_and_explained(app: App) -> None:
    at = app()
    state = at.session_state["explore"]
    text = "version: 1\nmodel: {target: x, fingerprint: '0000000000000000'}\npolicy: {units: [blocks.0]}\n"
    take_policy(state, GRAPH, text.encode())
    assert state.job.failure is None and spec(at).policy == Policy.recompute(["blocks.0"])
    assert state.imported is not None and "has changed since or is another one" in state.imported.changed


def test_what_is_known_to_go_wrong_is_said_before_the_run(app: App) -> None:
    """In the strip, beside Run and in the file: without its generator put back, dropout draws other numbers."""
    at = say(app(), on=list(ALL))
    assert figures(at)["Gradients"] == "not compared" and not at.error
    settle(widget(at, "toggle", "option_preserve_rng_state").set_value(False).run())
    assert figures(at)["Gradients"] == "not safe"
    assert len(at.error) == 2 and all("preserve" in error.value for error in at.error)
    assert graph_data(at)["labels"]["blocks"][2][0][0] == "✕"
    written = policy_text(at.session_state["explore"], GRAPH)
    assert written.startswith("# WARNING") and "other random numbers" in written.splitlines()[2]
    at = press(at, "undo")
    assert figures(at)["Gradients"] == "not compared" and not at.error
    at = upload(
        at, "version: 1\npolicy: {units: [blocks.0]}\nevidence: {device: a, torch_version: '2', verdict: different}"
    )
    assert graph_data(at)["on"] == ["blocks.0"]
    assert "evidence in this policy file says" in texts(at), "its own evidence speaks against it"
    assert "evidence in this policy file" not in texts(press(at, "run"))
