"""A Streamlit app on a free port of the loopback, and a Chromium to visit it: for the tests and for the figures."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GRAPH_PAGE = HERE / "graph_page.py"
START_S = 600.0
"""For a start, and for an end: other work may have most of each core."""


def launch(playwright: Playwright, path: str) -> Browser:
    """Chromium; root has to leave its sandbox out."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if root else [])


class Served:
    """A Streamlit app that is running."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://localhost:{port}"
        self.home: Path | None = None
        """The folder of its store, if `start` began it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(script: Path, *arguments: str, home: Path, root: Path = ROOT) -> Served:
    """Starts `streamlit run script -- arguments` in `root` and waits until it answers."""
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", str(script), f"--server.port={port}", "--", *arguments]
    environment = {**os.environ, "CHECKPOINT_EXPLORER_HOME": str(home)}
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    served = wait_for(process, port)
    served.home = home
    return served


def wait_for(process: subprocess.Popen[bytes], port: int) -> Served:
    """The app of `process` once it answers. A process that does not answer in time is killed: RuntimeError."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/_stcore/health", timeout=2):
                return Served(process, port)
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise RuntimeError(f"The app did not answer on port {port} within {START_S:g} s")
