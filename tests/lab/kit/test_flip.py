"""A model that changes to eval mode between forward and recompute: without the change every checkpoint is exact."""

from __future__ import annotations

import pytest

from explorer.lab.kit.bench import LabBench
from explorer.lab.kit.engines import CHECKPOINTS
from explorer.lab.kit.flip import flip_row


@pytest.mark.parametrize("layer", ["dropout", "batchnorm"])
@pytest.mark.parametrize("label", CHECKPOINTS)
def test_without_a_flip_it_is_bitwise_equal(label: str, layer: str) -> None:
    assert flip_row(LabBench(), label, layer, "never").outcome == "bitwise equal"


@pytest.mark.parametrize("label", CHECKPOINTS)
def test_a_flip_before_the_recompute_is_never_equal(label: str) -> None:
    assert flip_row(LabBench(), label, "dropout", "between").outcome != "bitwise equal"
