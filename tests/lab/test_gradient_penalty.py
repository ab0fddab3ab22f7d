"""Differentiated backward."""

from __future__ import annotations

import pytest

from tests.lab.running import outcomes


@pytest.mark.parametrize(("blocks", "hessian"), [("all", "raised"), ("first", "different"), ("last", "different")])
def test_reentrant_does_not_survive_differentiation(blocks: str, hessian: str) -> None:
    rows = outcomes("gradient-penalty", blocks=blocks)
    kinds = ("autograd.grad", "gradient penalty", "Hessian-vector product")
    assert {rows[f"{kind}: non-reentrant"] for kind in kinds} == {"bitwise equal"}
    assert [rows[f"{kind}: reentrant"] for kind in kinds[:2]] == ["raised", "raised"]
    assert rows["Hessian-vector product: reentrant"] in (hessian, "missing")
