"""Real Chromium against the real app on a free port of the loopback; where there is no Chromium the tests skip."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
START_S = 90.0
TIMEOUT_MS = 60_000
"""Of every wait: a loaded machine with one core takes that long."""
sys.path.insert(0, str(HERE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    from chromium import find
    from playwright.sync_api import sync_playwright

    path = find()
    if path is None:
        pytest.skip("no Chromium or Chrome was found; `make browser` installs one")
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=arguments)
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh visitor; an error that the page's script throws fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    context.set_default_timeout(TIMEOUT_MS)
    visited = context.new_page()
    errors: list[str] = []
    visited.on("pageerror", lambda error: errors.append(str(error)))
    yield visited
    context.close()
    assert not errors, errors


class Served:
    """A Streamlit app that is running."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://localhost:{port}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(script: Path, *arguments: str, home: Path) -> Served:
    """Starts `streamlit run script -- arguments` and waits until it answers."""
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", str(script), f"--server.port={port}", "--", *arguments]
    environment = {**os.environ, "CHECKPOINT_EXPLORER_HOME": str(home)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/_stcore/health", timeout=2):
                return Served(process, port)
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise RuntimeError(f"{script.name} did not answer on port {port} within {START_S:g} s")


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Starts apps; the same arguments give the same app for the whole module."""
    running: dict[tuple[str, ...], Served] = {}

    def served(script: Path, *arguments: str) -> Served:
        key = (str(script), *arguments)
        if key not in running:
            running[key] = start(script, *arguments, home=tmp_path_factory.mktemp("home"))
        return running[key]

    yield served
    for app in running.values():
        app.process.terminate()
        app.process.wait(timeout=30)
