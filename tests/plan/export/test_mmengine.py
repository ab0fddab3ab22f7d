"""MMEngine: names of modules, as Python reads them, or None."""

from __future__ import annotations

from typing import Any

import pytest

from explorer.plan.export.mmengine import to_mmengine
from tests.plan.export.runs import file_of


@pytest.mark.parametrize(("blocks", "names"), [(("a.0", 'b"\\'), ["a.0", 'b"\\']), ((), None)])
def test_names_are_data(blocks: tuple[str, ...], names: list[str] | None) -> None:
    space: dict[str, Any] = {}
    exec(to_mmengine(file_of(*blocks)).text, space)
    assert space["activation_checkpointing"] == names
