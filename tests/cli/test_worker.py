"""The worker as a command uses it: one document on stdout, Ctrl-C cancels, files whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from explorer.cli.worker import check_writable, make_folder, print_or_write, write_file
from explorer.errors import NotSaved
from tests.cli.asked import wrong


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


def test_a_file_is_written_whole_or_the_one_that_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.explorer"
    write_file(path, b"first")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(NotSaved, match="could not be written: No space left on device"):
        write_file(path, b"second")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_refused_before_a_run(tmp_path: Path) -> None:
    check_writable(None, tmp_path / "new")
    with pytest.raises(NotSaved, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(NotSaved, match="which is not a folder"):
        check_writable(tmp_path / "no" / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotSaved, match="could not be made"):
        make_folder(tmp_path / "file" / "below")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_text_goes_to_stdout_or_into_a_file_that_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_or_write("text", None)
    print_or_write("text", tmp_path / "out")
    printed = capsys.readouterr()
    assert printed.out == "text" == (tmp_path / "out").read_text() and "Wrote" in printed.err
