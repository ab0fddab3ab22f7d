"""Gradient and Hessian-vector product of a pipeline."""

from __future__ import annotations

import pytest

from tests.lab.running import outcomes, run, value


@pytest.mark.parametrize("microbatches", ["2", "4"])
def test_the_pipelines_checkpoint_breaks_second_order_only(microbatches: str) -> None:
    rows = outcomes("second-order", checkpoint="pipeline", microbatches=microbatches, mode="train")
    right = {"rounding", "bitwise equal"}
    assert {rows[f"{mode}: gradient"] for mode in ("always", "except_last", "never")} <= right
    assert rows["always: Hessian-vector product"] == "raised"
    assert rows["except_last: Hessian-vector product"] == "different"
    assert rows["never: Hessian-vector product"] in right


@pytest.mark.parametrize("checkpoint", ["pipeline", "torch"])
@pytest.mark.parametrize("microbatches", ["1", "2", "4"])
def test_eval_mode_and_torchs_checkpoint_are_right_in_both_orders(checkpoint: str, microbatches: str) -> None:
    mode = "eval" if checkpoint == "pipeline" else "train"
    outcome = run("second-order", checkpoint=checkpoint, microbatches=microbatches, mode=mode)
    assert {row.outcome for row in outcome.rows[1:]} <= {"rounding", "bitwise equal"}
    n_checkpointed = value(outcome, "always: gradient", "microbatches checkpointed")
    assert n_checkpointed == (0 if mode == "eval" else int(microbatches))
