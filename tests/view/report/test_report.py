"""One file, no network, small, and with everything in it that the page says about a run."""

from __future__ import annotations

import re

from explorer.record import Comparison
from explorer.view.report.report import report_text
from tests.view.builders import Chain, compared
from tests.view.report.read import MOST_BYTES, of


def test_it_fetches_nothing_and_is_small(pair: Comparison) -> None:
    text = report_text(of(pair))
    assert len(text.encode()) < MOST_BYTES
    assert set(re.findall(r"https?://[^\"'< ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, no address
    assert not re.search(r"<(link|img|iframe)|@import|url\((?!#)|src=", text)
    assert "default-src 'none'" in text


def test_a_deep_model_stays_small() -> None:
    """Twenty bands of two thousand points each: a stretch at one height is one line of the path."""
    deep = compared(Chain(n_blocks=200), recompute=range(0, 200, 2))
    assert len(report_text(of(deep)).encode()) < MOST_BYTES
