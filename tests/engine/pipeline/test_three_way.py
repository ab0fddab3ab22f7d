"""Where a difference comes from: microbatching, recompute or splitting, each told from the others."""

from __future__ import annotations

from explorer.engine.pipeline.run import run_pipeline
from explorer.record.policy import Policy
from tests.engine.pipeline.pipeline_nets import LANGUAGE
from tests.engine.pipeline.plans import spec
from tests.engine.pipeline.play_checks import SOME


def test_tied_weights_are_summed_and_named() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 3, arguments={"tied": True}))
    tied = next(s for s in run.gradients if len(s.stages) > 1)
    assert (tied.name, tied.stages) == ("tokens.weight", (0, 2))
    assert tied.splitting.relative_norm is not None
    assert tied.splitting.relative_norm < 1e-6
    assert (tied.splitting.bitwise, tied.splitting.verdict) == (False, "rounding")
    assert all(s.splitting.bitwise for s in run.gradients if s is not tied)
    assert any("tokens.weight" in note for note in run.notes)


def test_a_partial_tied_gradient_would_be_seen() -> None:
    """The test above has teeth: one stage's share alone is far off."""
    from explorer.engine.pipeline.cut.build import build
    from explorer.engine.pipeline.play.inproc import run_pass

    pipeline = build(spec("language", LANGUAGE, 3, arguments={"tied": True}))
    run_pass(pipeline)
    (_, first), (_, last) = pipeline.owners["tokens.weight"]
    assert first.data_ptr() == last.data_ptr()
    assert first.grad is not None
    assert last.grad is not None
    whole = pipeline.gradients()["tokens.weight"]
    assert whole is not None
    for part in (first.grad, last.grad):
        assert (part / 4 - whole).norm() > 0.01 * whole.norm()


def test_shares_tell_recompute_from_splitting() -> None:
    """A policy that does not restore the generator is wrong by itself; splitting adds nothing to it."""
    careless = Policy.recompute(LANGUAGE[1:4], preserve_rng_state=False)
    run = run_pipeline(spec("language", LANGUAGE, 3, careless))
    assert "different" in {s.recompute.verdict for s in run.gradients}
    kept = run_pipeline(spec("language", LANGUAGE, 3, SOME))
    assert all(shares.recompute.bitwise and shares.splitting.bitwise for shares in kept.gradients)
