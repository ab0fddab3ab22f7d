"""Late answers, older reruns, presets and moves in any order: the real script of the desk, in Playwright's node."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DESK = HERE.parents[1] / "explorer" / "ui" / "components" / "desk.js"
N_ORDERS = 3000


def test_no_order_loses_a_change_or_draws_over_a_newer_one() -> None:
    playwright = pytest.importorskip("playwright")
    node = Path(playwright.__file__).parent / "driver" / "node"
    if not node.exists():
        pytest.skip("this wheel of Playwright has no node")
    command = [str(node), str(HERE / "desk_in_node.mjs"), str(DESK), str(N_ORDERS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, f"{N_ORDERS} orders\n"), done.stdout + done.stderr
