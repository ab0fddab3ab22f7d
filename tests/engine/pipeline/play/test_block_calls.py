"""How often each block really ran, forward and for backward."""

from __future__ import annotations

import msgspec
import pytest

from explorer.engine.pipeline.run import run_pipeline
from tests.engine.pipeline.pipeline_nets import LANGUAGE
from tests.engine.pipeline.plans import spec
from tests.engine.pipeline.play_checks import SOME, assert_split_is_exact


@pytest.mark.parametrize(("mode", "again"), [("always", 4), ("except_last", 3), ("never", 0)])
def test_which_microbatches_are_checkpointed(mode: str, again: int) -> None:
    run = run_pipeline(spec("language", LANGUAGE, 3, SOME, checkpoint=mode, schedule="1F1B"))
    assert_split_is_exact(run)
    calls = {block.fqn: (block.n_forward, block.n_recompute) for block in run.blocks}
    assert calls["blocks.1"] == (4, again)
    assert calls["head"] == (4, 0)


def test_eval_mode_recomputes_all_the_same() -> None:
    run = run_pipeline(msgspec.structs.replace(spec("language", LANGUAGE, 3, SOME), mode="eval"))
    assert_split_is_exact(run)
    assert {block.n_recompute for block in run.blocks if block.fqn in SOME.blocks} == {4}
