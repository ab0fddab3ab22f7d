"""A snapshot for PyTorch's memory viewer is CUDA's alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from explorer.engine.bench.other_tools import save_snapshot
from explorer.errors import NotOnThisDevice
from explorer.record import RunSpec
from tests.engine.tiny_nets import ref


def test_a_snapshot_needs_cudas_allocator(tmp_path: Path) -> None:
    with pytest.raises(NotOnThisDevice, match="asked of cpu"):
        save_snapshot(RunSpec(model=ref("chain")), tmp_path / "step.pickle")
    assert not list(tmp_path.iterdir())
