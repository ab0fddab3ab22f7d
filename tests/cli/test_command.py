"""Commands and their options: one sentence for every error, exit codes, the worker, and what is printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from explorer.cli import command as cli_verb
from explorer.cli import verbs
from explorer.cli.main import app, listed_verbs
from explorer.cli.options import ModelOptions
from explorer.cli.report import document, print_record
from explorer.errors import BadInput
from explorer.jobs.client import Worker
from explorer.plan.policy.presets import PRESETS
from explorer.plan.recognize import LORA_EXAMPLE, lora_of
from explorer.record import RunSpec
from explorer.record.base import limits
from tests import graphs
from tests.cli.asked import read, run, wrong
from tests.view.builders import compared, measured


def test_a_narrow_terminal_clips_nothing(shared: Worker, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_verb, "_PIPE_WIDTH", 80)
    arguments = ("compare", tiny, "--policy", "every-2", "--quick", "--repeats", "0", "--set", "width=256")
    compared = run(*arguments).stdout
    assert "\u2026" not in compared  # how a clipped cell ends
    rows = [line.rstrip() for line in compared.splitlines() if "MFLOP" in line]  # of tables: sentences wrap nowhere
    assert rows and max(map(len, rows)) <= 80


@pytest.mark.parametrize(("arguments", "words"), [
    (["measure", "nowhere.py"], ["nowhere.py"]),
    (["measure", "TINY:biuld"], ["biuld", "Did you mean build"]),
    (["measure", "WRONG:trouble"], ["invalid for input of size"]),
    (["measure", "WRONG:trouble", "--set", "kind=exits"], ["The model called sys.exit(3)"]),
    (["graph", "WRONG:trouble", "--set", "kind=asks for too much"], ["asked for 4,503,599,627,370,496 bytes"]),
    (["measure", "TINY", "--size", "huge"], ["huge", "small, gpu"]),
    (["measure", "TINY", "--set", "width"], ["--set takes NAME=VALUE and got width"]),
    (["measure", "TINY", "--set", "witdh=3"], ["witdh", "width"]),
    (["measure", "TINY", "--memory-limit", "1GB"], ["'1GB' is not a size", "write 1GiB"]),
    (["measure", "TINY", "--policy", "sqr"], ["neither a preset, nor a block, nor a file", "sqrt"]),
    (["measure", "TINY", "--policy", "gone.yaml"], ["gone.yaml cannot be read"]),
    (
        ["measure", "TINY", "--save", "/nowhere/at/all.run", "--repeats", "0"],
        ["lies in /nowhere/at, which is not a folder"],
    ),
    (["graph", "WRONG:trouble"], ["invalid for input of size"]),
    (["check", "gone.yaml", "TINY"], ["gone.yaml cannot be read"]),
    (["check", "TINY", "TINY"], ["not YAML: line 1"]),
    (["export", "gone.yaml", "--to", "torch"], ["gone.yaml cannot be read"]),
    (["graph", "TINY", "--out", "graph.txt"], ["--out writes the document of --json"]),
    (["report", "gone.pickle"], ["There is no run gone.pickle"]),
])  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_2(
    shared: Worker, tiny: str, arguments: list[str], words: list[str]
) -> None:
    arguments = [argument.replace("TINY", tiny).replace("WRONG", wrong(tiny)) for argument in arguments]
    result = run(*arguments, code=2)
    error = result.stderr[result.stderr.index("Error:") :]
    for word in words:
        assert word in error, error
    assert "Traceback" not in result.stderr
    assert "\n" not in error.partition("       ")[0].strip()


def test_the_traceback_and_the_document_of_an_error(shared: Worker, tiny: str) -> None:
    result = run("measure", f"{tiny}:biuld", "--traceback", "--json", code=2)
    assert "Traceback" in result.stderr and "load.py" in result.stderr
    assert json.loads(result.stdout)["failure"]["kind"] == "bad input"
    failed = read("measure", f"{wrong(tiny)}:trouble", code=2)
    assert failed["failure"]["kind"] == "model raised" and failed["spec"], "what was recorded until then is kept"
    assert failed["step_peak_bytes"] is None and failed["complete"] is False, "a part of a step has no headline figure"


def test_help_names_every_verb_and_each_option_whole_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert set(re.findall(r"^. (\w+) ", run("--help").stdout, flags=re.M)) >= set(listed_verbs())
    for name, options in (("compare", PRESETS), ("measure", ["--parallelize"])):
        text = run(name, "--help").stdout
        assert all(option in text for option in options) and "\u2026" not in text
    assert run("--version").stdout.strip()


def test_a_full_disk_behind_stdout_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "explorer", "models"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "No space left" in done.stderr


def test_the_list_of_verbs_imports_none_of_them() -> None:
    code = "import sys; from explorer.cli.main import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "explorer.cli.main" in loaded and {"explorer.cli.verbs.models", "numpy", "plotly"}.isdisjoint(loaded)


def test_a_new_verb_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = '@verb\ndef greet(name: str) -> None:\n    """Says hello."""\n    print(f"hello {name}")\n'
    (tmp_path / "greet.py").write_text(f"from explorer.cli.command import verb\n{code}")
    monkeypatch.setattr(verbs, "__path__", [*verbs.__path__, str(tmp_path)])
    assert "Says hello." in run("--help").stdout
    assert run("greet", "you").stdout == "hello you\n"
    sys.modules.pop(f"{verbs.__name__}.greet")


def test_check_knows_under_which_conditions_the_policy_runs(shared: Worker, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "conditions.yaml"
    path.write_text("version: 1\npolicy: {units: [blocks.1], use_reentrant: true, preserve_rng_state: false}\n")

    def rules(*words: str, code: int = 1) -> set[str]:
        return {hazard["rule"] for hazard in read("check", str(path), tiny, *words, code=code)["hazards"]}

    plain = rules()
    assert "dropout-redrawn" in plain
    assert {"dropout-redrawn", "mode-flips"}.isdisjoint(rules("--mode", "eval", code=0))
    assert "reentrant-autocast" in rules("--autocast", "bfloat16") - plain
    assert "reentrant-frozen" in rules("--frozen", "blocks.0") - plain
    assert "no block or parameter" in run("check", str(path), tiny, "--frozen", "blocs.0", code=2).stderr


@pytest.mark.parametrize(("text", "names", "rank"), [
    ("r=16,targets=q_proj+v_proj", {"q_proj", "layers.3.q_proj", "v_proj"}, 16),
    ("targets=0.qkv", {"0.qkv", "blocks.0.qkv"}, 8),
    ("r=2, targets=head+", {"head", "a.head"}, 2),
])  # fmt: skip
def test_adapters_are_named_by_the_ends_of_layers(text: str, names: set[str], rank: int) -> None:
    lora = lora_of(text)
    others = {"q_proj2", "my_q_proj", "q_proj.x", "blocks.10xqkv", "ahead", "blocks.00.qkv"}
    assert {name for name in names | others if re.fullmatch(lora.targets, name)} == names
    assert lora.rank == rank


@pytest.mark.parametrize(
    "text", ["", "r=8", "r=0,targets=a", "rank=8,targets=a", "targets=", "targets=+", "targets=a|b"]
)
def test_other_words_for_adapters_end_in_a_sentence(text: str) -> None:
    said = run("measure", "net.py", "--lora", text, code=2).stderr
    assert "--lora takes a rank and names of Linear layers" in said and LORA_EXAMPLE in said


def test_a_step_with_adapters_holds_what_was_predicted(shared: Worker, tiny: str) -> None:
    words = ("measure", tiny, "--lora", "r=2,targets=linear", "--repeats", "1", "--json")
    played, measured = (json.loads(run(*words, *more).stdout) for more in (("--predict",), ()))
    assert played["step_peak_bytes"] == pytest.approx(measured["step_peak_bytes"], rel=1e-3)
    plain = json.loads(run("measure", tiny, "--predict", "--json").stdout)
    assert played["step_peak_bytes"] != plain["step_peak_bytes"]


def test_check_takes_a_preset(shared: Worker, tiny: str) -> None:
    assert read("check", "all", tiny)["hazards"] == read("check", "every-2", tiny)["hazards"] == []


def test_arguments_of_the_factory_have_the_type_they_look_like() -> None:
    ref = ModelOptions(arguments=["a=6", "b=0.5", "c=true", "d=x=y", "e=-1e-3", "f="]).ref("m.py")
    assert ref.arguments == {"a": 6, "b": 0.5, "c": True, "d": "x=y", "e": -1e-3, "f": ""}
    with pytest.raises(BadInput, match="=3, x"):
        ModelOptions(arguments=["=3", "x"]).ref("m.py")


def test_the_usual_size_is_named_where_a_file_has_sizes(tmp_path: Path) -> None:
    assert ModelOptions().ref("sample_models/gpt.py").size == "small"
    assert ModelOptions(size="tiny").ref("sample_models/gpt.py").size == "tiny"
    net = tmp_path / "net.py"
    net.write_text("SIZES = {'wide': {'n': 2}, 'deep': {'n': 4}}\n")
    assert ModelOptions().ref(f"{net}:build").size == "wide"
    net.write_text("def build(): ...\n")
    assert ModelOptions().ref(f"{net}:build").size is None
    assert ModelOptions().ref("hf:LlamaConfig").size is None and ModelOptions().ref("a.b:build").size is None


OPTIONS = {"n_repeats": "--repeats", "n_threads": "--threads", "n_accumulation": "--accumulate", "seed": "--seed"}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_number_beyond_the_limits_of_the_record_is_refused(name: str) -> None:
    for beyond in (limits(RunSpec, name)[0] - 1, limits(RunSpec, name)[1] + 1):
        refused = CliRunner().invoke(app, ["measure", "sample_models/mlp.py", f"{OPTIONS[name]}={beyond}"])
        assert refused.exit_code == 2 and f"Invalid value for '{OPTIONS[name]}'" in refused.stderr, refused.output


def test_a_block_with_a_recomputed_block_inside_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    plain = measured()
    blocks = tuple(replace(block, recompute_flops=7_000) for block in plain.blocks)
    print_record(replace(plain, blocks=blocks))
    rows = [line for line in capsys.readouterr().out.splitlines() if "7.00 kFLOP" in line]
    assert rows and all(line.split()[-1] == "inside" for line in rows)


def test_caveats_of_the_peak_are_in_the_document_of_every_run() -> None:
    plain = measured()
    assert document(plain)["caveats"] == ()
    assert plain.allocations is not None
    log = msgspec.structs.replace(plain.allocations, ops=(*plain.allocations.ops, "aten::mkldnn_rnn_layer"))
    recurrent = msgspec.structs.replace(plain, allocations=log)
    (caveat,) = document(recurrent)["caveats"]
    assert "oneDNN" in caveat
    both = document(msgspec.structs.replace(compared(), candidate=recurrent))
    assert both["candidate"]["caveats"] == (caveat,) and both["baseline"]["caveats"] == ()


GRAPH = graphs.gpt(4)
