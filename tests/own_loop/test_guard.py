"""The fixture `guard` as a project's tests use it, and the workflow docs/memory.yml as a shell runs it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from explorer.cli.main import app
from explorer.cli.verbs import lock as verb
from explorer.engine.bench.measure import measure_without_data
from explorer.errors import BadInput, InvalidPolicy
from explorer.own_loop.guard import GuardedStep, _described, predicted_lock
from explorer.plan.guard.lock import dumps
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

pytest_plugins = ["explorer.own_loop.pytest_plugin"]
ROOT = Path(__file__).resolve().parents[2]
NET = str(ROOT / "tests/plan/guard/faulty_net.py")
Guard = Callable[..., GuardedStep]


def test_figures_of_a_step_are_asserted_in_words(guard: Guard) -> None:
    step = guard(NET, policy="*.1")
    step.peak_below("1 MiB")
    peak = step._lock.step.peak_bytes
    step.peak_below(peak + 1)
    with pytest.raises(AssertionError, match="not below"):
        step.peak_below(peak)
    with pytest.raises(
        AssertionError, match=r"peak is 8\d\.\d KiB, not below 64.0 KiB. In recompute it holds optimizer"
    ):
        step.peak_below("64 KiB")
    step.recomputes("blocks.1")
    step.recomputes("blocks.2")  # checkpoints its own code
    with pytest.raises(AssertionError, match=r"Not recomputed: blocks.0 \(1 of 3 blocks\)"):
        step.recomputes("blocks.*")
    with pytest.raises(InvalidPolicy, match="No block matches"):
        step.recomputes("layers.*")
    with pytest.raises(BadInput, match="no condition dtpye"):
        guard(NET, dtpye="bfloat16")


def test_the_gradient_is_compared_on_real_steps(guard: Guard, tmp_path: Path) -> None:
    guard(NET, policy="all").same_gradient()
    (tmp_path / "careless.yaml").write_text("version: 1\npolicy: {units: [blocks.1], preserve_rng_state: false}\n")
    with pytest.raises(AssertionError, match="different"):
        guard(NET, policy=str(tmp_path / "careless.yaml"), set={"fault": "dropout switched on"}).same_gradient()


def test_a_lock_that_moved_fails_with_its_sentences(guard: Guard, tmp_path: Path) -> None:
    path = tmp_path / "net.lock"
    path.write_text(dumps(predicted_lock(RunSpec(model=ModelRef(target=NET)), "keep-all")))
    guard(NET).same_as_lock(path)
    with pytest.raises(AssertionError, match=r"blocks.1 has other results: clone \(bfloat16\) none"):
        guard(NET, set={"fault": "another copy"}).same_as_lock(path)


def test_the_workflow_fails_in_a_shell_and_writes_what_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands its `run` step as a runner does; the command it starts then runs in this process."""
    steps = yaml.safe_load((ROOT / "docs/memory.yml").read_text())["jobs"]["lock"]["steps"]
    install, check = (step["run"] for step in steps if "run" in step)
    assert install.startswith("pip install ")
    net = Path(NET).read_text()
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(net)
    lock = predicted_lock(RunSpec(model=ModelRef(target="models.py:build")), "keep-all")
    Path("explorer.lock").write_text(dumps(lock))
    Path("models.py").write_text(net.replace('build(fault: str = "")', 'build(fault: str = "another copy")'))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    started = subprocess.run(["bash", "-e", "-c", check], env=environment, capture_output=True, text=True, check=True)
    module, name, *arguments = started.stdout.splitlines()
    assert (module, name) == ("-m", "explorer")
    monkeypatch.setattr(verb, "worker", nullcontext)  # a worker takes seconds to import
    monkeypatch.setattr(verb, "describe", lambda _, spec, **__: _described(spec))
    monkeypatch.setattr(verb, "run_of", lambda _, request: measure_without_data(request.spec))
    ran = CliRunner().invoke(app, arguments, terminal_width=120)
    assert ran.exit_code == 1, ran.output
    assert "blocks.1 has other results: clone (bfloat16) none → 256 B kept: +256 B." in ran.stdout
    assert "| `blocks.1` | 5.6 KiB | 5.4 KiB | 0 | 0 |" in (tmp_path / "summary.md").read_text()
