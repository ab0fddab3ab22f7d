"""Random numbers by seed, block and microbatch, whatever the split."""

from __future__ import annotations

import torch

from explorer.engine.pipeline.cut.keyed_rng import KeyedRng
from explorer.engine.pipeline.run import run_pipeline
from tests.engine.pipeline.pipeline_nets import LANGUAGE
from tests.engine.pipeline.plans import spec


def test_keys_differ_by_block_and_microbatch_and_seed() -> None:
    drawn = set()
    for seed in (0, 1):
        rng = KeyedRng(seed, ("a", "b"))
        for block in ("a", "b"):
            for microbatch in (0, 1):
                rng.enter(block, microbatch)
                drawn.add(torch.rand(()).item())
    assert len(drawn) == 8


def test_dropout_without_keys_depends_on_the_split() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 3, keyed_rng=False))
    assert run.n_splitting_equal < len(run.gradients)
    assert max(s.splitting.relative_norm or 0.0 for s in run.gradients) > 1e-3
    assert any("not keyed" in note for note in run.notes)
