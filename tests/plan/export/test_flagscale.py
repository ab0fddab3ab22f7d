"""FlagScale says which microbatches of each stage recompute."""

from __future__ import annotations

import pytest
import yaml

from explorer.errors import InvalidPlan
from explorer.plan.export.formats import exported
from tests.plan.export.runs import PLAN, file_of


def test_flagscale_says_which_microbatches() -> None:
    """Its rows are [stages, microbatches, value, microbatches, value]; they sum to the plan's."""
    form = exported(file_of("layers.0", "layers.2", "layers.3", plan=PLAN), "flagscale")
    rows = yaml.safe_load(form.text)
    for key in ("granularity", "method", "num_layers"):
        table = rows[f"recompute_{key}_per_stage_micro_batch"]
        assert sum(row[0] for row in table) == len(PLAN.stages)
        assert all(sum(row[1::2]) == PLAN.n_microbatches for row in table)
    assert rows["recompute_num_layers_per_stage_micro_batch"] == [[1, 3, 1, 1, 0], [1, 3, 2, 1, 0]]
    assert form.fit == "exact"
    shifted = exported(file_of("layers.1", plan=PLAN), "flagscale")
    assert (shifted.extra, shifted.missing) == (("layers.0",), ("layers.1",))
    with pytest.raises(InvalidPlan, match="holds no pipeline plan"):
        exported(file_of("layers.0"), "flagscale")
