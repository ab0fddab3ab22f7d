"""Words on the primary colour are dark in the dark theme alone, and only where the button has its colour."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import streamlit as st

from explorer.ui.shared.readable import ON_PRIMARY, on_primary


@pytest.mark.parametrize(
    ("theme", "disabled", "coloured"), [("dark", False, True), ("dark", True, False), ("light", False, False)]
)
def test_a_label(theme: str, disabled: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st, "context", SimpleNamespace(theme=SimpleNamespace(type=theme)))
    assert (ON_PRIMARY in on_primary("Run", disabled=disabled)) == coloured
    assert "Run" in on_primary("Run", disabled=disabled)
