"""What was written for torchrun, started as a person starts it: real processes, from wherever they are."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from explorer.engine.pipeline.run import open_results
from explorer.plan.export.torchrun import run_files
from tests.engine.pipeline.pipeline_nets import LANGUAGE
from tests.engine.pipeline.plans import spec


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_ranks_start_from_another_folder_and_through_a_relative_path(tmp_path: Path) -> None:
    plan = spec("language", LANGUAGE, 2, schedule="1F1B")
    folder, elsewhere = tmp_path / "packed" / "run", tmp_path / "some" / "where else"
    for one in (folder, elsewhere):
        one.mkdir(parents=True)
    for name, text in run_files(plan).items():
        (folder / name).write_text(text)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        ["sh", "../../packed/run/../../packed/run/run.sh", "--master-port", str(free_port())],
        cwd=elsewhere,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    run = open_results(plan, folder / "results")
    assert run.failure is None
    assert run.gradients
    assert all(shares.splitting.bitwise for shares in run.gradients)
    assert not list(elsewhere.iterdir())
