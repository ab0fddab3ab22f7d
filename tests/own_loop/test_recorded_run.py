"""A file is written whole or not at all, also where the process is killed in the middle of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from explorer.jobs.run_file import read

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import os, resource, signal, sys
from pathlib import Path
from explorer.own_loop.record_step import RecordedRun
from explorer.record import Comparison
from explorer.record.base import from_msgpack

run = RecordedRun(from_msgpack(Path(sys.argv[1], "tests/golden/cpu.msgpack").read_bytes(), Comparison).candidate)
if sys.argv[3] == "writing":  # the system kills it at byte 1000
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
if sys.argv[3] == "naming":
    sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event == "os.rename" else None)
getattr(run, sys.argv[2])("step.file")
"""


def child(folder: Path, verb: str, killed: str) -> int:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT), verb, killed], cwd=folder, check=False, env={"PYTHONPATH": str(ROOT)}
    ).returncode


@pytest.mark.parametrize(("killed", "by"), [("writing", signal.SIGXFSZ), ("naming", signal.SIGKILL)])
def test_a_process_that_is_killed_while_it_writes_leaves_no_half_written_file(
    tmp_path: Path, killed: str, by: signal.Signals
) -> None:
    file = tmp_path / "step.file"
    assert child(tmp_path, "save", killed) == -by and not file.exists()
    assert child(tmp_path, "save", "never") == 0
    whole = file.read_bytes()
    assert read(whole).kind == "measurement"
    assert child(tmp_path, "report", killed) == -by and file.read_bytes() == whole
