"""The wheel, installed into an environment outside of the checkout: every command that the pages name, and the page.

The libraries come from the environment of the tests by a .pth file, and the checkout is on no path.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from venv import EnvBuilder

import pytest
import yaml

from tests.plan.card.histories import small_document

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SOURCES = ("explorer", "sample_models", ".streamlit", "app.py", "setup.py", "pyproject.toml", "README.md", "LICENSE")
_FENCE = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^(?:python -m explorer|checkpoint-explorer) (.*)$", re.MULTILINE)
NET = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.mix(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def build():
    return Net(), torch.randn(256, 16)
"""
TRAIN = """
import argparse, torch
from net import build
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--batch-size", type=int, default=32)
options = parser.parse_args()
model, batch = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
for step in range(4):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""
TRACE = '{"traceEvents": [{"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1,'
TRACE += ' "args": {"Device Type": 1, "Device Id": 0, "Addr": 4096, "Bytes": 512, "Total Allocated": 512}}]}'
NEEDS_CUDA_BUILD = "--card h100 train.py", "--card h100 --ranks", "--verify", "--card 24GiB --steps"
"""Commands that run torch's CUDA build; without it they are refused in one sentence."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def commands(page: Path) -> list[str]:
    """The command lines in the examples of a page, without `app`, which never ends."""
    lines = [line for code in _FENCE.findall(page.read_text()) for line in _COMMAND.findall(code)]
    return [line for line in lines if not line.startswith("app")]


def commands_by_page() -> dict[Path, list[str]]:
    """Of each page the commands whose verb and options stand on no earlier page: equal ones differ by their values."""
    seen: set[tuple[str, ...]] = set()
    of_page: dict[Path, list[str]] = {}
    for page in PAGES:
        for command in commands(page):
            words = shlex.split(command, comments=True)
            shape = (words[0], *sorted(word for word in words if word.startswith("--")))
            if shape not in seen:
                seen.add(shape)
                of_page.setdefault(page, []).append(command)
    return of_page


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment's programs, with the wheel of this tree installed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    EnvBuilder(with_pip=False).create(folder / "env")
    programs = folder / "env" / "bin"
    install = [*pip, "--python", str(programs / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    (libraries,) = (folder / "env").glob("lib/python*/site-packages")
    (libraries / "of_the_tests.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return programs


def environment(home: Path) -> dict[str, str]:
    """Of this process, without a way to the checkout."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**variables, "CHECKPOINT_EXPLORER_HOME": str(home), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Files of the names that the pages use."""
    import pickle

    place = tmp_path_factory.mktemp("elsewhere")
    for name in ("net.py", "model.py", "models.py"):
        (place / name).write_text(NET)
    (place / "train.py").write_text(TRAIN)
    (place / "trace.json").write_text(TRACE)
    (place / "snapshot.pickle").write_bytes(pickle.dumps(small_document()))
    yield place


def call(programs: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(programs / "checkpoint-explorer"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment(folder / "home"), capture_output=True, text=True)


def test_the_wheel_has_its_own_app_samples_and_version_and_no_file_of_the_checkout(
    installed: Path, folder: Path
) -> None:
    ask = "import explorer, explorer.plan.catalogue as c, importlib.metadata as m; print(explorer.__file__, c.SAMPLES, "
    ask += "c.beside_or_inside('app.py', 'page'), explorer.__version__ == m.version('checkpoint-explorer'), sep='\\n')"
    command = [str(installed / "python"), "-c", ask]
    answer = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
    *paths, same_version = answer.stdout.split()
    assert same_version == "True" and len(paths) == 3
    assert all(Path(path).is_relative_to(installed.parent) and Path(path).exists() for path in paths)
    assert not [path for path in Path(paths[0]).parent.rglob("setup.py")]


@pytest.mark.parametrize("page", commands_by_page(), ids=lambda page: page.stem)
def test_every_command_of_a_page_runs_from_another_folder(installed: Path, folder: Path, page: Path) -> None:
    call(installed, folder, "compare", "models.py", "--policy", "all", "--out", "policy.yaml")
    call(installed, folder, "run", "train.py", "--at", "2", "--stop", "--out", "run.explorer")
    for command in commands_by_page()[page]:
        words = ["run.explorer" if word == "RUN" else word for word in shlex.split(command, comments=True)]
        answer = call(installed, folder, *words)
        if "No policy brings" in answer.stderr or "no policy brings" in answer.stderr:
            continue  # an answer about this small net
        if any(text in command for text in NEEDS_CUDA_BUILD):
            assert answer.returncode == 2 and "CUDA build" in answer.stderr, command
        else:
            assert answer.returncode in (0, 1), (command, answer.returncode, answer.stderr[-800:])
            assert answer.stdout or "Wrote" in answer.stderr, command
        assert "Traceback" not in answer.stderr, (command, answer.stderr)


ELSEWHERE = """
import os, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
del os.fork
from explorer.__main__ import main
sys.argv[0] = "checkpoint-explorer"
main()
"""
"""The command on a system that lacks what only Unix has."""


def test_nothing_that_only_unix_has_is_needed_to_predict_plan_and_report(folder: Path) -> None:
    questions = (
        "measure net.py --predict",
        "measure net.py --predict --card 24GiB",
        "run train.py --at 2 --stop --out here.explorer",
        "plan here.explorer --budget 90% --out here.yaml",
        "plan net.py --predict --budget 90% --out here.yaml",
        "report here.explorer --out here.html",
        "report here.explorer",
        "lock net.py --policy here.yaml --out here.lock",
        "lock net.py --check here.lock",
        "net.py",
    )
    variables = {**environment(folder / "unix"), "PYTHONPATH": str(ROOT)}
    for question in questions:
        command = [sys.executable, "-P", "-c", ELSEWHERE, *shlex.split(question)]
        answer = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert answer.returncode == 0, (question, answer.stderr[-2000:])
    apply = (
        "import explorer, net; model, x = net.build(); explorer.apply_policy(model, explorer.load_policy('here.yaml'))"
    )
    command = [sys.executable, "-c", ELSEWHERE.partition("from explorer")[0] + apply + "; model(x).sum().backward()"]
    assert subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True).returncode == 0


def test_a_module_that_is_called_explorer_too_is_named(installed: Path, folder: Path, tmp_path: Path) -> None:
    for name in ("net.py", "train.py"):
        shutil.copy(folder / name, tmp_path / name)
    (tmp_path / "explorer.py").write_text("def mine(): ...\n")
    (tmp_path / "wrong.py").write_text("from explorer import mine\n" + NET)
    assert f"{tmp_path / 'explorer.py'} has the name" in call(installed, tmp_path, "train.py").stderr
    assert call(installed, tmp_path, "net.py").returncode == 0
    refused = call(installed, tmp_path, "wrong.py")
    assert refused.returncode == 2 and "Rename your file" in refused.stderr


def test_the_action_and_the_hook_run_in_a_plain_shell(installed: Path, folder: Path, tmp_path: Path) -> None:
    (step,) = yaml.safe_load((ROOT / ".github/actions/lock/action.yml").read_text())["runs"]["steps"]
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    shutil.copy(folder / "net.py", tmp_path / "net.py")
    assert call(installed, tmp_path, "lock", "net.py", "--out", "explorer.lock").returncode == 0
    variables = {**environment(tmp_path), "MODEL": "net.py", "LOCK": "explorer.lock"}
    variables["PATH"] = f"{installed}:{variables['PATH']}"
    lines = (step["run"], f"{hook['entry']} net.py --check explorer.lock")

    def codes() -> list[int]:
        return [subprocess.run(["bash", "-ec", line], cwd=tmp_path, env=variables).returncode for line in lines]

    assert codes() == [0, 0]
    (tmp_path / "net.py").write_text(NET.replace("range(4)", "range(5)"))
    assert codes() == [1, 1]
