"""Price lists that are measured once."""

from __future__ import annotations

import pytest

from explorer.record.pipeline_cost import PipelineProfile
from tests.engine.pipeline.profiles import NETS, profiled


@pytest.fixture(scope="session")
def profiles() -> dict[str, PipelineProfile]:
    """By net."""
    return {net: profiled(net) for net in NETS}
