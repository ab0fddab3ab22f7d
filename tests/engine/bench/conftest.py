"""One pair of runs, measured once for all who read it."""

from __future__ import annotations

import pytest

from explorer.engine.bench.measure import measure_pair
from explorer.record import Measurement, Policy, RunSpec
from tests.engine.bench.gpt_runs import BLOCKS, GPT


@pytest.fixture(scope="session")
def pair() -> tuple[Measurement, Measurement]:
    """The small GPT with everything kept, and with all its blocks recomputed."""
    return measure_pair(
        RunSpec(model=GPT, n_repeats=3), RunSpec(model=GPT, n_repeats=3, policy=Policy.recompute(BLOCKS))
    )
