"""Finds a Chromium for the browser tests, or installs one; where it can have none it says why and tests skip.

Run as a script by `make browser`; tests and figures only call `find()`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SHELL = "chromium-headless-shell"
"""Draws no window of its own: Chromium without a window takes a third more CPU for a short visit."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", SHELL)
APT = ("apt-get", "install", "--yes", "--no-install-recommends")


def find(names: Sequence[str] = NAMES) -> str | None:
    """Path of a Chromium or Chrome: $CHROMIUM, the first of `names` on the PATH, or the one Playwright installed; None
    where none is."""
    if named := os.environ.get("CHROMIUM"):
        return named if Path(named).exists() else None
    if on_path := next(filter(None, map(shutil.which, names)), None):
        return on_path
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
    return str(own) if own.exists() else None


def install() -> str:
    """Installs a Chromium: Debian's own as root, Playwright's elsewhere. Returns why it failed, or an empty string."""
    if shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(("apt-get", "update", "--quiet"), capture_output=True, check=False)
        if subprocess.run((*APT, SHELL), capture_output=True, check=False).returncode == 0:
            return ""
        commands = [(*APT, "chromium")]
    else:
        commands = [(sys.executable, "-m", "playwright", "install", "chromium")]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()
            return f"`{' '.join(command)}` ended with {done.returncode}: {last[-1] if last else 'no output'}"
    return ""


def main() -> None:
    path = find()
    if path is None:
        print("No Chromium found; installing one for the browser tests.")
        reason = install()
        path = find()
        if path is None:
            print(f"The browser tests will be skipped: {reason or 'no Chromium was found after installing it'}.")
            return
    print(f"Browser tests run in {path}.")


if __name__ == "__main__":
    main()
