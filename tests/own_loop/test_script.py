"""A script as it is, its model found by its first optimizer, and everything as found behind it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from explorer.errors import BadInput
from explorer.own_loop.script import ScriptUnderWatch, model_of

SCRIPT = """
import sys
import torch
from beside import WIDTH

assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "0.1"]
model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
ENDING
"""


def script(folder: Path, ending: str = "") -> ScriptUnderWatch:
    (folder / "train.py").write_text(SCRIPT.replace("ENDING", ending))
    (folder / "beside.py").write_text("WIDTH = 8\n")
    files = str(folder / "step{step}.explorer")
    return ScriptUnderWatch(folder / "train.py", at=(1, 2), on_oom=None, files=files)


@pytest.mark.parametrize(
    ("ending", "error"), [("", None), ("raise SystemExit(3)", SystemExit), ("1 / 0", ArithmeticError)]
)
def test_it_runs_as_main_and_leaves_everything_as_found(
    ending: str, error: type[BaseException] | None, tmp_path: Path
) -> None:
    before = sys.argv, sys.path[:], Optimizer.__init__
    under_watch = script(tmp_path, ending)
    try:
        if error is None:
            under_watch.run(["--lr", "0.1"])
        else:
            with pytest.raises(error):
                under_watch.run(["--lr", "0.1"])
    finally:
        sys.modules.pop("beside", None)
    assert (sys.argv, sys.path, Optimizer.__init__) == before
    assert under_watch.watch is not None and set(under_watch.watch.runs) == {1, 2}
    assert under_watch.watch.runs[1].measurement.recorded_in == "train.py, step 1"
    assert (tmp_path / "step2.explorer").exists() and under_watch.watch.where == "train.py"


def test_a_script_without_an_optimizer_is_watched_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("done = True\n")
    under_watch = ScriptUnderWatch(tmp_path / "none.py", at=(1,), on_oom=None, files="")
    under_watch.run([])
    assert under_watch.watch is None


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="There is no script"):
        ScriptUnderWatch(tmp_path / "nowhere.py", at=(1,), on_oom=None, files="")


def test_the_model_is_the_outermost_that_holds_most_of_what_is_trained() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    around = nn.Sequential(model)
    part = torch.optim.SGD([*model[0].parameters(), model[1].weight], lr=0.1)
    assert model_of(part) is around
    assert model_of(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)) is None
