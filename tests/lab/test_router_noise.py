"""A router that changes its mind."""

from __future__ import annotations

import pytest

from tests.lab.running import outcomes


@pytest.mark.parametrize("noise", ["strong", "weak"])
def test_a_router_without_snapshot_is_refused_or_silently_wrong(noise: str) -> None:
    off, on = (outcomes("router-noise", preserve_rng_state=state, noise=noise) for state in ("off", "on"))
    assert off["non-reentrant"] == "raised" and off["reentrant"] == "different"
    assert set(on.values()) == {"baseline", "bitwise equal"}
