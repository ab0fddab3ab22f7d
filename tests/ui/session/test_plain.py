"""Names of a model are text on the page, never markup."""

from __future__ import annotations

import pytest

from explorer.ui.session.plain import plain


@pytest.mark.parametrize("text", ["**b** [x](http://e)", "<img src=x>", ":red[x] $y$", "`code` a_b_c", "\\"])
def test_no_markup_survives(text: str) -> None:
    escaped = plain(text)
    for i, character in enumerate(escaped):
        if character in "*[]<>$`_":
            assert escaped[i - 1] == "\\"
