"""What the options say is what runs: the usual size is named, so that a run is of the same model as the page's."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from explorer.cli.main import app
from explorer.cli.options import ModelOptions, StepOptions
from explorer.record.base import limits
from explorer.record.graph import ModelRef
from explorer.record.policy import KEEP_ALL
from explorer.record.run import N_REPEATS, RunSpec


def test_the_usual_size_is_named_where_a_file_has_sizes(tmp_path: Path) -> None:
    assert ModelOptions().ref("sample_models/gpt.py").size == "small"
    assert ModelOptions(size="tiny").ref("sample_models/gpt.py").size == "tiny"
    net = tmp_path / "net.py"
    net.write_text("SIZES = {'wide': {'n': 2}, 'deep': {'n': 4}}\n")
    assert ModelOptions().ref(f"{net}:build").size == "wide"
    net.write_text("def build(): ...\n")
    assert ModelOptions().ref(f"{net}:build").size is None
    assert ModelOptions().ref("hf:LlamaConfig").size is None and ModelOptions().ref("a.b:build").size is None


def test_steps_are_timed_as_often_as_asked() -> None:
    model = ModelRef(target="sample_models/mlp.py")
    assert StepOptions().spec(model, KEEP_ALL, seed=0).n_repeats == N_REPEATS
    assert StepOptions(n_repeats=2).spec(model, KEEP_ALL, seed=0).n_repeats == 2


OPTIONS = {"n_repeats": "--repeats", "n_threads": "--threads", "n_accumulation": "--accumulate", "seed": "--seed"}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_number_beyond_the_limits_of_the_record_is_refused(name: str) -> None:
    for beyond in (limits(RunSpec, name)[0] - 1, limits(RunSpec, name)[1] + 1):
        refused = CliRunner().invoke(app, ["measure", "sample_models/mlp.py", f"{OPTIONS[name]}={beyond}"])
        assert refused.exit_code == 2 and f"Invalid value for '{OPTIONS[name]}'" in refused.stderr, refused.output
