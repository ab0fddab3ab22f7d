"""eval() between forward and backward."""

from __future__ import annotations

from tests.lab.running import outcomes


def test_a_flipped_mode_is_refused_or_silently_wrong() -> None:
    rows = outcomes("mode-flip", layer="dropout", flip="between")
    assert rows["non-reentrant"] == "raised" and rows["reentrant"] == "different"
    assert set(outcomes("mode-flip", layer="dropout", flip="never").values()) == {"baseline", "bitwise equal"}


def test_a_flipped_batchnorm_without_the_check_is_reported_whatever_happens() -> None:
    rows = outcomes("mode-flip", layer="batchnorm", flip="between")
    assert rows["non-reentrant"] == "raised" and rows["reentrant"] == "different"
    assert rows["non-reentrant, check off"] in ("crashed", "raised", "different")
