"""What needs processes: the ladder of models that do not fit, a model that ends its process, and whole commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from explorer.jobs.client import Worker
from explorer.jobs.worker import ENGINE
from tests.cli.asked import run, wrong
from tests.cli.conftest import give

pytestmark = pytest.mark.slow

MIB = 2**20
NETS = '''"""Tensors of 1 MiB, made element by element: nothing counts but what is kept."""
import torch
from torch import nn


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = x + self.bias
        for _ in range(6):
            x = x.square()
        return x


def blocks(n_blocks=3, n_waves=6):
    """Everything kept 108 MiB; one block at a time 43; of one block one wave at a time 19."""
    stacks = (nn.Sequential(*(Wave() for _ in range(n_waves))) for _ in range(n_blocks))
    return nn.Sequential(*stacks), torch.zeros(1, 2**18)
'''


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nets") / "nets.py"
    path.write_text(NETS)
    return path


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Its malloc gives every tensor pages of its own and takes none ahead: then the limit is one of tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_ARENA_MAX", "1")
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
        worker = Worker(tmp_path_factory.mktemp("runs") / "runs.sqlite", program=replace(ENGINE, warm=()))
        worker.warm()
        give(patch, worker)
        yield worker
    worker.close()


LIMITED = ("--repeats", "0", "--optimizer", "none")


def headings(stderr: str) -> list[str]:
    """What the progress lines say in front of their colon, each once: the rungs that were tried."""
    words = (line.rpartition(": ")[0] for line in stderr.splitlines() if "does not fit, now" in line)
    return list(dict.fromkeys(words))


@pytest.mark.usefixtures("real")
def test_below_that_blocks_inside_blocks_are_recomputed_too(nets: Path) -> None:
    asked = ("plan", f"{nets}:blocks", *LIMITED, "--memory-limit", "32MiB", "--budget", "24MiB", "--json")
    result = run(*asked)
    assert headings(result.stderr) == [
        "everything kept does not fit, now every block recomputed",
        "every block recomputed does not fit, now every block at every depth recomputed",
    ]
    (sentence,) = [line for line in one_line_each(result.stderr) if line.startswith("Did not fit")]
    assert re.fullmatch(
        r"Did not fit: everything kept, at least [\d,.]+ MiB, then every block recomputed, at least [\d,.]+ MiB, then "
        r"refused\. Put together from the run that fitted, everything kept needs 1[01]\d\.\d MiB \(predicted\)\.",
        sentence,
    ), sentence
    document = json.loads(result.stdout)
    assert document["met"] and not document["contradiction"]
    assert document["plan"]["baseline_step_peak_bytes"] == pytest.approx(111 * MIB, rel=0.04)
    assert document["plan"]["step_peak_bytes"] == pytest.approx(document["measured"]["step_peak_bytes"], rel=1e-3)
    assert document["measured"]["step_peak_bytes"] <= 24 * MIB
    assert document["first_run"]["step_peak_bytes"] < 24 * MIB, "the rung that fitted"


@pytest.mark.usefixtures("real")
def test_where_no_rung_fits_the_command_says_so_and_prints_no_figure(nets: Path) -> None:
    result = run("plan", f"{nets}:blocks", *LIMITED, "--memory-limit", "10MiB", "--budget", "9MiB", code=2)
    (sentence,) = [line for line in one_line_each(result.stderr) if line.startswith("Did not fit")]
    assert sentence.endswith("then refused.") and "was refused" in result.stderr and "Traceback" not in result.stderr
    assert not result.stdout


def one_line_each(stderr: str) -> list[str]:
    """Sentences as they were said, however wide the terminal was."""
    return stderr.replace("\n       ", " ").splitlines()


@pytest.mark.usefixtures("real")
def test_a_model_that_ends_its_process_or_hangs_is_one_sentence(tiny: str) -> None:
    left = run("measure", f"{wrong(tiny)}:trouble", "--set", "kind=leaves", code=2).stderr
    assert "exit code 7" in left and "Traceback" not in left
    assert "time limit of 1 s" in run("measure", tiny, "--time-limit", "1", "--set", "trouble=hangs", code=2).stderr


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


def test_a_real_process_prints_the_document_and_nothing_else(tiny: str) -> None:
    process = spawn("measure", tiny, "--repeats", "1", "--json")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["step_peak_bytes"] > 0
    # Progress is looked at now and then, so which of its words are seen depends on the machine.
    assert stderr.strip() and "a model may print" not in stdout


def test_ctrl_c_cancels_and_leaves_nobody_behind(tiny: str, tmp_path: Path) -> None:
    started = tmp_path / "started"
    process = spawn("graph", f"{wrong(tiny)}:trouble", "--set", "kind=hangs", STARTED=str(started))
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 2 and "Cancelled." in stderr and "Traceback" not in stderr
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)
