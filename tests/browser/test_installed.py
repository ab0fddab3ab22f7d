"""The page of an installed wheel: `checkpoint-explorer app net.py` in a folder that is not the checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser.measured import measured
from tests.browser.served import free_port, wait_for
from tests.test_wheel import environment, folder, installed

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["folder", "installed"]


def test_the_printed_link_opens_the_model_of_the_folder(
    page: Page, installed: Path, folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    command = [str(installed / "checkpoint-explorer"), "app", "net.py", "--port", str(port)]
    process = subprocess.Popen(command, cwd=folder, env=environment(tmp_path), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        link = process.stdout.readline().decode().split()[2]
        assert link.startswith(f"http://localhost:{port}/?model=net.py")
        wait_for(process, port)
        measured(page, link)
        page.get_by_text("layers.3").first.wait_for()
    finally:
        process.kill()
        process.wait()
