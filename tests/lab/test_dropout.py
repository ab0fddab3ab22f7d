"""Masks, gradients and loss with and without the snapshot."""

from __future__ import annotations

import pytest

from tests.lab.running import run


@pytest.mark.parametrize("p", ["0.1", "0.3", "0.5"])
def test_masks_and_gradients_need_the_snapshot_and_the_loss_does_not_tell(p: str) -> None:
    wrong, right = run("dropout", preserve_rng_state="off", p=p), run("dropout", preserve_rng_state="on", p=p)
    assert wrong.row("recomputed").outcome == "different" and right.row("recomputed").outcome == "bitwise equal"
    assert wrong.row("recomputed").value("loss") == wrong.row("kept").value("loss")
    shares = [row.value("mask elements that differ") for row in wrong.rows[2:]]
    # 4 x 512 elements: four standard errors of a share near one half are below 0.05.
    assert sum(shares) / len(shares) == pytest.approx(2 * float(p) * (1 - float(p)), abs=0.05)
    assert all(row.value("mask elements that differ") == 0 for row in right.rows[2:])
