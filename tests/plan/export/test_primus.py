"""Primus: numbers of the layers, the same under every pipeline size."""

from __future__ import annotations

import yaml

from explorer.plan.export.primus import to_primus
from tests.plan.export.runs import file_of


def test_numbers_in_order_or_nothing() -> None:
    assert yaml.safe_load(to_primus(file_of("layers.3", "layers.0")).text) == {
        "recompute_granularity": "full",
        "recompute_method": None,
        "recompute_layer_ids": "0,3",
    }
    assert yaml.safe_load(to_primus(file_of()).text) == {"recompute_granularity": None}
    assert to_primus(file_of("layers.0.mlp")).fit == "not expressible"
