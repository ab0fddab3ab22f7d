"""The model that settings of other programs are read for."""

from __future__ import annotations

import pytest

from explorer.record.graph import ModelGraph
from tests.graphs import gpt


@pytest.fixture
def graph() -> ModelGraph:
    return gpt(8, names="layers")
