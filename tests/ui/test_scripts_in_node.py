"""Late answers, lost requests, older reruns and moves in any order: real scripts of the page, in Playwright's node."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
COMPONENTS = HERE.parents[1] / "explorer" / "ui" / "components"
N_ORDERS = 3000


@pytest.mark.parametrize("script", ["desk", "news"])
def test_no_order_loses_a_change_or_draws_over_a_newer_one(script: str) -> None:
    """The desk keeps each step of a person. The news bring the page to the last of them, and only to new ones."""
    playwright = pytest.importorskip("playwright")
    node = Path(playwright.__file__).parent / "driver" / "node"
    if not node.exists():
        pytest.skip("this wheel of Playwright has no node")
    command = [str(node), str(HERE / f"{script}_in_node.mjs"), str(COMPONENTS / f"{script}.js"), str(N_ORDERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, f"{N_ORDERS} orders\n"), done.stdout + done.stderr
