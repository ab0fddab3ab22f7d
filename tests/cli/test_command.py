"""What every command shares: one sentence for an error, a code that scripts can trust, tables that clip nothing."""

from __future__ import annotations

import json

import pytest

from explorer.cli import command as cli_verb
from explorer.jobs.client import Worker
from tests.cli.asked import read, run, wrong


def test_a_narrow_terminal_clips_nothing(shared: Worker, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_verb, "_PIPE_WIDTH", 80)
    arguments = ("compare", tiny, "--policy", "every-2", "--quick", "--repeats", "0", "--set", "width=256")
    for text in (run(*arguments).stdout, run("lab", "dropout").stdout):
        assert "\u2026" not in text  # how a clipped cell ends
    rows = [line.rstrip() for line in run(*arguments).stdout.splitlines() if "FLOP" in line]
    assert rows and max(map(len, rows)) <= 80


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
        (["measure", "TINY", "--memory-limit", "1GB"], ["'1GB' is not a size", "write 1GiB"]),
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
