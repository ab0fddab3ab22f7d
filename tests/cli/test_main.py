"""The command line as scripts rely on it: one document on stdout, one sentence on stderr, and exit codes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from explorer.cli import command as cli_verb
from explorer.cli import main as cli
from explorer.cli import verbs
from explorer.cli.options import ModelOptions
from explorer.errors import BadInput
from explorer.jobs.client import Worker
from explorer.jobs.store import Store
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.presets import PRESETS
from explorer.record.base import from_plain
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement

TINY = '''"""Three blocks with dropout, and ways to go wrong."""
import os, time
import torch
from torch import nn

SIZES = {"small": {"width": 8}, "gpu": {"width": 16}}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(torch.relu(self.linear(x)))


class Tiny(nn.Module):
    def __init__(self, width, trouble):
        super().__init__()
        self.trouble = trouble
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.trouble == "raises":
            x.view(3, 5)
        if self.trouble == "hangs":
            open(os.environ.get("STARTED", os.devnull), "w").close()
            time.sleep(60)
        if self.trouble == "exits":
            raise SystemExit(3)
        if self.trouble == "asks for too much":
            torch.empty(2**50)
        if self.trouble == "leaves":
            os._exit(7)
        return x


def build(width, trouble=""):
    print("a model may print")
    return Tiny(width, trouble), torch.randn(256, width)
'''
TROUBLE = '''"""Goes wrong as it is told."""
from tiny import build


def trouble(kind="raises"):
    return build(8, kind)
'''


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    (tmp_path / "wrong.py").write_text(TROUBLE)
    return str(path)


def wrong(tiny: str) -> str:
    """The file beside it, whose model fails."""
    return tiny.replace("tiny.py", "wrong.py")


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, list(arguments), terminal_width=120)
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    return result


def read(*arguments: str, code: int = 0) -> Any:
    """The one document on stdout."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def as_record(document: dict[str, Any], kind: Any) -> Any:
    """The record in a document of `--json`, without the headline figures beside its fields."""
    fields = {name: document[name] for name in kind.__struct_fields__}
    if kind is Comparison:
        for name in ("baseline", "candidate"):
            fields[name] = {key: fields[name][key] for key in Measurement.__struct_fields__}
    return from_plain(fields, kind)


def test_every_verb_explains_itself() -> None:
    listed = run("--help").stdout
    for name in ("models", "graph", "measure", "compare", "check", "export", "matrix", "lab", "pipeline"):
        assert name in listed and "Usage" in run(name, "--help").stdout
    assert run("--version").stdout.strip()


def test_a_new_verb_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = 'import typer\n\n\ndef greet(name: str) -> None:\n    """Says hello."""\n    typer.echo(f"hello {name}")\n'
    (tmp_path / "greet.py").write_text(code)
    monkeypatch.setattr(verbs, "__path__", [*verbs.__path__, str(tmp_path)])
    shell = typer.Typer()
    for one in cli.found_verbs():
        shell.command()(one)
    assert "Says hello." in CliRunner().invoke(shell, ["--help"]).stdout
    assert CliRunner().invoke(shell, ["greet", "you"]).stdout == "hello you\n"
    sys.modules.pop(f"{verbs.__name__}.greet")


def test_models(root: Path) -> None:
    listed = {sample["target"] for sample in read("models")}
    assert listed == {f"sample_models/{path.name}" for path in (root / "sample_models").glob("[!_]*.py")}
    assert "sample_models/gpt.py" in run("models").stdout


def test_graph_in_every_format(shared: Worker, tiny: str, tmp_path: Path) -> None:
    graph = read("graph", tiny)
    assert [block["fqn"] for block in graph["blocks"]][:3] == ["", "blocks", "blocks.0"] and graph["fingerprint"]
    assert json.loads(run("graph", tiny, "--format", "json").stdout) == graph
    assert "×3" in run("graph", tiny).stdout
    assert run("graph", tiny, "--format", "dot").stdout.startswith("digraph")
    run("graph", tiny, "--format", "dot", "--out", str(tmp_path / "graph.dot"))
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")
    assert "blocks" not in run("graph", tiny, "--format", "png", code=2).stdout


def test_measure_prints_the_record_with_its_headlines(shared: Worker, tiny: str, tmp_path: Path) -> None:
    saved = tmp_path / "one.run"
    document = read(
        "measure", tiny, "--policy", "every-2", "--repeats", "2", "--optimizer", "sgd", "--save", str(saved)
    )
    record = as_record(document, Measurement)
    assert record.headlines() == {name: document[name] for name in record.headlines()}
    assert record.spec.policy.blocks == ("blocks.0", "blocks.2") and record.spec.optimizer == "sgd"
    assert document["step_peak_bytes"] > document["saved_after_forward_bytes"] > 0
    store = Store(shared.store_path)
    assert store.load(store.list()[0].run_id) == record == store.load(store.import_file(saved.read_bytes()))
    n_runs = len(store.list())
    text = run("measure", tiny, "--repeats", "2", "--no-store").stdout
    assert "Step peak" in text and "measured" in text and "keep all" in text and len(store.list()) == n_runs


def test_compare_and_the_policy_file_that_comes_of_it(shared: Worker, tiny: str, tmp_path: Path) -> None:
    path = str(tmp_path / "policy.yaml")
    document = read("compare", tiny, "--policy", "all", "--repeats", "2", "--out", path)
    record = as_record(document, Comparison)
    assert document["verdict"] == record.verdict == "bitwise equal"
    assert document["candidate"]["saved_after_forward_bytes"] < document["baseline"]["saved_after_forward_bytes"]
    file = policy_file.load(path)
    assert file.policy == record.candidate.spec.policy and file.evidence is not None
    assert file.evidence.verdict == "bitwise equal"
    assert file.evidence.step_peak_bytes == record.candidate.step_peak_bytes
    text = run("compare", tiny, "--policy", path, "--repeats", "2", "--quick").stdout
    assert "bitwise equal" in text and "blocks.0" in text

    checked = read("check", path, tiny)
    assert checked["fresh"] and checked["fingerprint"] == file.fingerprint
    assert "Nothing known goes wrong" in run("check", path, tiny).stdout
    assert checked["not_foretold_because"] == ""
    assert not read("check", path, tiny, "--size", "gpu", code=1)["fresh"]
    other = run("measure", tiny, "--policy", path, "--size", "gpu", "--repeats", "0")
    assert "has changed since or is another one: " in other.stderr

    exported = run("export", path, "--to", "torch").stdout
    assert "def apply_checkpointing(model)" in exported and "blocks.2" in exported
    run("export", path, "--to", "torch", "--out", str(tmp_path / "applied.py"))
    assert (tmp_path / "applied.py").read_text() == exported


def test_a_narrow_terminal_clips_nothing(shared: Worker, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_verb, "_PIPE_WIDTH", 80)
    arguments = ("compare", tiny, "--policy", "every-2", "--quick", "--repeats", "0", "--set", "width=256")
    for text in (run(*arguments).stdout, run("lab", "dropout").stdout):
        assert "\u2026" not in text  # how a clipped cell ends
    rows = [line.rstrip() for line in run(*arguments).stdout.splitlines() if "FLOP" in line]
    assert rows and max(map(len, rows)) <= 80


def test_a_difference_is_exit_code_1(shared: Worker, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\npolicy: {units: [blocks.0, blocks.1], preserve_rng_state: false}\n")
    document = read("compare", tiny, "--policy", str(path), "--repeats", "1", code=1)
    assert document["verdict"] == "different" and document["worst"]["name"]
    assert document["worst"]["name"] in run("compare", tiny, "--policy", str(path), "--repeats", "1", code=1).stdout
    assert any(hazard["severity"] == "error" for hazard in read("check", str(path), tiny, code=1)["hazards"])


COUNTS = '''"""Two blocks that count their forwards."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), 0

    def forward(self, x):
        self.step += 1
        return torch.relu(self.linear(x))


def build():
    return nn.Sequential(Block(), Block()), torch.randn(2, 4)
'''


def test_state_that_moved_twice_is_exit_code_3(shared: Worker, tmp_path: Path) -> None:
    model, out = tmp_path / "counts.py", tmp_path / "policy.yaml"
    model.write_text(COUNTS)
    arguments = ("compare", str(model), "--policy", "all", "--repeats", "0", "--out", str(out))
    document = read(*arguments, code=3)
    assert document["verdict"] == "state moved" and document["n_bitwise_equal"] == document["n_gradients"]
    assert document["moved_twice"] == ["step of 0", "step of 1"]
    evidence = policy_file.load(str(out)).evidence
    assert evidence is not None and evidence.verdict == "state moved"
    printed = run(*arguments, code=3).stdout
    assert "state moved twice: step of 0, step of 1" in printed and "(1 → 2)" in printed


def test_check_knows_under_which_conditions_the_policy_runs(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "conditions.yaml"
    path.write_text("version: 1\npolicy: {units: [blocks.1], use_reentrant: true, preserve_rng_state: false}\n")

    def rules(*words: str, code: int = 1) -> set[str]:
        return {hazard["rule"] for hazard in read("check", str(path), tiny, *words, code=code)["hazards"]}

    plain = rules()
    assert "dropout-redrawn" in plain
    assert {"dropout-redrawn", "mode-flips"}.isdisjoint(rules("--mode", "eval", code=0))
    for words, rule in (
        (("--autocast", "bfloat16"), "reentrant-autocast"),
        (("--frozen", "blocks.0"), "reentrant-frozen"),
    ):
        assert rule in rules(*words) - plain
    assert "no block or parameter" in run("check", str(path), tiny, "--frozen", "blocs.0", code=2).stderr


def test_a_result_that_cannot_be_saved_is_printed_all_the_same(
    shared: Worker, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("an older policy")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = run("compare", tiny, "--policy", "all", "--quick", "--repeats", "0", "--out", str(path), "--json", code=2)
    assert json.loads(result.stdout)["verdict"] == "bitwise equal"
    assert "No space left on device" in result.stderr
    assert path.read_text() == "an older policy" and len(list(tmp_path.glob("policy*"))) == 1


def test_a_matrix_of_derivatives(shared: Worker, tiny: str) -> None:
    document = read("matrix", tiny, "--policy", "every-2")
    assert {cell["outcome"] for cell in document["cells"]} >= {"bitwise equal"}
    assert "backward" in run("matrix", tiny, "--policy", "every-2").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["measure", "nowhere.py"], ["nowhere.py"]),
        (["measure", "TINY:biuld"], ["biuld", "Did you mean build"]),
        (["measure", "WRONG:trouble"], ["invalid for input of size"]),
        (["measure", "WRONG:trouble", "--set", "kind=leaves"], ["exit code 7", "measure"]),
        (["measure", "WRONG:trouble", "--set", "kind=exits"], ["The model called sys.exit(3)"]),
        (["graph", "WRONG:trouble", "--set", "kind=asks for too much"], ["asked for 4,503,599,627,370,496 bytes"]),
        (["measure", "TINY", "--size", "huge"], ["huge", "small, gpu"]),
        (["measure", "TINY", "--set", "width"], ["--set takes NAME=VALUE and got width"]),
        (["measure", "TINY", "--set", "witdh=3"], ["witdh", "width"]),
        (["measure", "TINY", "--memory-limit", "1GB"], ["'1GB' is not a size", "1.5GiB"]),
        (["measure", "TINY", "--policy", "sqr"], ["neither a preset nor a file", "sqrt"]),
        (["measure", "TINY", "--policy", "gone.yaml"], ["gone.yaml cannot be read"]),
        (
            ["measure", "TINY", "--save", "/nowhere/at/all.run", "--repeats", "0"],
            ["lies in /nowhere/at, which is not a folder"],
        ),
        (["measure", "TINY", "--time-limit", "1", "--set", "trouble=hangs"], ["time limit of 1 s"]),
        (["measure", "TINY", "--snapshot", "step.pickle"], ["only CUDA's allocator has one"]),
        (["graph", "WRONG:trouble"], ["invalid for input of size"]),
        (["check", "gone.yaml", "TINY"], ["gone.yaml cannot be read"]),
        (["check", "TINY", "TINY"], ["not YAML: line 1"]),
        (["export", "gone.yaml", "--to", "torch"], ["gone.yaml cannot be read"]),
    ],
)
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


def test_arguments_of_the_factory_have_the_type_they_look_like() -> None:
    ref = ModelOptions(arguments=["a=6", "b=0.5", "c=true", "d=x=y", "e=-1e-3", "f="]).ref("m.py")
    assert ref.arguments == {"a": 6, "b": 0.5, "c": True, "d": "x=y", "e": -1e-3, "f": ""}
    with pytest.raises(BadInput, match="=3, x"):
        ModelOptions(arguments=["=3", "x"]).ref("m.py")


def test_presets_are_named_in_the_help() -> None:
    shown = run("compare", "--help").stdout
    assert all(name in shown for name in PRESETS)


def spawn(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    # A suite that runs in a shell's background ignores Ctrl-C, and a child would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "explorer", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **environment},
        )
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_real_process_prints_the_document_and_nothing_else(tiny: str) -> None:
    process = spawn("measure", tiny, "--repeats", "1", "--json")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["step_peak_bytes"] > 0
    # Progress is looked at now and then, so which of its words are seen depends on the machine.
    assert stderr.strip() and "a model may print" not in stdout


@pytest.mark.slow
def test_ctrl_c_cancels_and_leaves_nobody_behind(tiny: str, tmp_path: Path) -> None:
    started = tmp_path / "started"
    process = spawn("graph", f"{wrong(tiny)}:trouble", "--set", "kind=hangs", STARTED=str(started))
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and "Cancelled." in stderr and "Traceback" not in stderr
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)
