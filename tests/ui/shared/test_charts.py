"""A chart's table as a file: a spreadsheet takes none of it for a formula."""

from __future__ import annotations

from explorer.ui.shared.charts import as_csv


def test_a_spreadsheet_takes_no_cell_for_a_formula() -> None:
    lines = as_csv([{"name": "=cmd()", "n": -1}, {"name": "plain", "more": 2}]).splitlines()
    assert lines == ["name,n,more", "'=cmd(),-1,", "plain,,2"]
