"""Scripts as people publish them, in the Markdown files of this folder: written to a folder, and run under watch."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
_FILE = re.compile(r"^## (\S+)\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ARGUMENTS: dict[str, tuple[str, str, str]] = json.loads(
    dict(_FILE.findall((HERE / "cuda_scripts.md").read_text()))["arguments.json"]
)
"""Of each script of `cuda_scripts.md`: for a small step, of a usual size, to add for a refusal on 24 GiB."""
RANKS = {"ddp.py": "2", "fsdp.py": "2"}


def scripts_of(markdown: str, folder: Path) -> Path:
    """`folder`, with the scripts of that file of this folder."""
    for name, text in _FILE.findall((HERE / markdown).read_text()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def answer(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m explorer ARGUMENTS` in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = {"PYTHONPATH": str(HERE.parents[1]), "CHECKPOINT_EXPLORER_HOME": str(folder)}
    command = [sys.executable, "-P", "-m", "explorer", *arguments]
    environment = {**os.environ, **paths, "MASTER_PORT": port}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def on_card(folder: Path, card: str, script: str, arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of `cuda_scripts.md` on an imaginary card, with as many ranks as it needs."""
    ranks = ("--ranks", RANKS[script]) if script in RANKS else ()
    command = ("run", "--card", card, "--json", "--out", f"{script}.explorer", *ranks, script, "--")
    return answer(folder, *command, *arguments.split())
