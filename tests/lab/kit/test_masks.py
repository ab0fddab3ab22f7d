"""Masks side by side: what two independent ones would show, and rows that say which repeat."""

from __future__ import annotations

import pytest
import torch

from explorer.lab.kit.masks import agreement, chance_of, mask_chart, mask_rows, mismatches
from explorer.lab.kit.nets import Dropped, chain


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_chance_is_the_share_in_which_two_drawn_masks_differ(p: float) -> None:
    torch.manual_seed(0)
    first, second = torch.rand(2, 200_000) >= p
    # Four standard errors of a share of 200,000 draws are below 0.005.
    assert 1 - agreement(first, second) == pytest.approx(chance_of(p), abs=0.005)


def test_mismatches_compare_the_first_two_masks_of_each_block() -> None:
    model = chain(lambda: Dropped(0.5), 2)
    same, other = torch.tensor([True, False]), torch.tensor([True, True])
    model[0].dropout.masks, model[1].dropout.masks = [same, same], [same, other]
    shares = mismatches(model)
    assert shares == [0.0, 0.5]
    assert [row.outcome for row in mask_rows(shares)] == ["bitwise equal", "different"]
    drawn, chance = mask_chart(shares, 0.5).series
    assert drawn.y == (0.0, 50.0) and chance.y == (50.0, 50.0)
