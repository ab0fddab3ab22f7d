"""What the options say is what runs: the usual size is named, so that a run is of the same model as the page's."""

from __future__ import annotations

from pathlib import Path

from explorer.cli.options import ModelOptions, StepOptions
from explorer.record.graph import ModelRef
from explorer.record.policy import KEEP_ALL
from explorer.record.run import N_REPEATS


def test_the_usual_size_is_named_where_a_file_has_sizes(tmp_path: Path) -> None:
    assert ModelOptions().ref("sample_models/gpt.py").size == "small"
    assert ModelOptions(size="tiny").ref("sample_models/gpt.py").size == "tiny"
    net = tmp_path / "net.py"
    net.write_text("SIZES = {'wide': {'n': 2}, 'deep': {'n': 4}}\n")
    assert ModelOptions().ref(f"{net}:build").size == "wide"
    net.write_text("def build(): ...\n")
    assert ModelOptions().ref(f"{net}:build").size is None
    assert ModelOptions().ref("hf:LlamaConfig").size is None and ModelOptions().ref("a.b:build").size is None


def test_steps_are_timed_as_often_as_asked_or_as_the_verb_needs() -> None:
    model = ModelRef(target="sample_models/mlp.py")
    assert StepOptions().spec(model, KEEP_ALL, seed=0).n_repeats == N_REPEATS
    assert StepOptions().spec(model, KEEP_ALL, seed=0, n_repeats=9).n_repeats == 9
    assert StepOptions(n_repeats=2).spec(model, KEEP_ALL, seed=0, n_repeats=9).n_repeats == 2
