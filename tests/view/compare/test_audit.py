"""The audit tables put what is wrong on top."""

from __future__ import annotations

import msgspec

from explorer.record import MaskDiff, RngDiff, StateChange
from explorer.view.compare.gradients import mask_table, recompute_count_table, rng_table, state_change_table
from tests.view.builders import compared


def test_what_differs_comes_first() -> None:
    pair = msgspec.structs.replace(
        compared(),
        rng=(RngDiff(generator="torch cpu", equal=True), RngDiff(generator="python", equal=False)),
        masks=(MaskDiff(block="a", n_elements=10, n_mismatched=0), MaskDiff(block="b", n_elements=10, n_mismatched=2)),
        state_changes=(
            StateChange(block="bn", name="num_batches_tracked", kind="buffer", after_forward="1", after_backward="2"),
        ),
    )
    assert [row["generator"] for row in rng_table(pair)] == ["python", "torch cpu"]
    assert [(row["block"], row["mismatch share"]) for row in mask_table(pair)] == [("b", 0.2), ("a", 0.0)]
    assert state_change_table(pair)[0]["after backward"] == "2"


def test_a_named_block_that_did_not_run_again_is_listed() -> None:
    pair = compared(recompute=[1, 2])
    blocks = tuple(
        msgspec.structs.replace(cost, n_recompute=0) if cost.fqn.startswith("layers.1") else cost
        for cost in pair.candidate.blocks
    )
    still = msgspec.structs.replace(pair, candidate=msgspec.structs.replace(pair.candidate, blocks=blocks))
    table = {row["block"]: row for row in recompute_count_table(still)}
    assert table["layers.1"] == {"block": "layers.1", "in the policy": True, "ran forward": 1, "ran again": 0}
    assert table["layers.2"]["ran again"] == 1
