"""The golden run, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from explorer.record import Comparison
from explorer.record.base import from_msgpack

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "cpu.msgpack"


@pytest.fixture(scope="session")
def pair() -> Comparison:
    return from_msgpack(GOLDEN.read_bytes(), Comparison)
