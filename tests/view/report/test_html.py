"""The page a report stands on: one small file, nothing fetched, and no markup out of a name."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from explorer.view.report.report import charts_of
from explorer.view.report.svg import svg
from tests.view.report.kinds import KINDS
from tests.view.report.read import MOST_BYTES, text_of


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_small_file_that_fetches_nothing(kind: str) -> None:
    text = text_of(kind)
    assert len(text.encode()) < MOST_BYTES and "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"'< ]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "<b>no</b>" not in text and "<i>chains</i>" not in text
    for chart in charts_of(KINDS[kind]).values():
        tree = ET.fromstring(svg(chart))
        assert tree.get("aria-label") == chart.alt and "nan" not in svg(chart)
