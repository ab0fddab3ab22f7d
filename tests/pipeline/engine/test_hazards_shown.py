"""Traps of a plan happen, and their remedies end them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from explorer.engine.model.describe import describe
from explorer.errors import InvalidPlan
from explorer.pipeline.engine.run import run_pipeline
from explorer.pipeline.record.step import PipelineRun
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan, RunSpec
from tests.engine import trap_nets
from tests.engine.policy.test_hazards_shown import rules


def pipelined(net: str, plan: dict[str, Any], policy: Policy | None = None) -> tuple[RunSpec, PipelineRun | None]:
    """A run of `net` in two stages (blocks `0` and `1`, then the rest); None where the plan is refused."""
    name, *words = net.split()
    arguments = dict(word.split("=") for word in words)
    spec = RunSpec(model=trap_nets.ref(name, **arguments), optimizer="none", policy=policy or Policy())
    chain = describe(spec.model).chain
    stages = plan.pop("stages", (chain[:2], chain[2:]))
    spec = msgspec.structs.replace(spec, plan=PipelinePlan(stages=stages, **plan))
    try:
        return spec, run_pipeline(spec)
    except InvalidPlan:
        return spec, None


def guilty(run: PipelineRun | None, share: str) -> int:
    """Gradients that `share` (microbatching, recompute, splitting) left unequal."""
    assert run is not None and run.failure is None, run
    return sum(not getattr(shares, share).bitwise for shares in run.gradients)


class TestPipelines:
    @pytest.mark.parametrize(("rule", "into", "out"), [
        ("indivisible-batch", {"n_microbatches": 3}, {"n_microbatches": 4}),
        ("few-microbatches", {"n_microbatches": 1, "schedule": "1F1B"}, {"n_microbatches": 2, "schedule": "1F1B"}),
        ("few-microbatches", {"n_microbatches": 1, "schedule": "1F1B"}, {"n_microbatches": 1, "schedule": "GPipe"}),
    ])  # fmt: skip
    def test_refused_plans(self, rule: str, into: dict[str, Any], out: dict[str, Any]) -> None:
        spec, run = pipelined("plain", into)
        assert rule in rules(spec) and run is None
        spec, run = pipelined("plain", out)
        assert rule not in rules(spec) and run is not None and guilty(run, "splitting") == 0

    def test_batch_norm_sees_microbatches(self) -> None:
        spec, run = pipelined("batch_norm", {"n_microbatches": 2})
        assert "statistics-per-microbatch" in rules(spec)
        worst = max(shares.microbatching.relative_norm or 0.0 for shares in run.gradients)
        assert worst > 1e-2
        spec, run = pipelined("plain", {"n_microbatches": 2})
        assert "statistics-per-microbatch" not in rules(spec)
        assert max(shares.microbatching.relative_norm or 0.0 for shares in run.gradients) < 1e-5

    def test_masks_by_order_of_the_schedule(self) -> None:
        spec, run = pipelined("dropout", {"n_microbatches": 4, "keyed_rng": False})
        assert "masks-by-order" in rules(spec) and guilty(run, "splitting") > 0
        spec, run = pipelined("dropout", {"n_microbatches": 4})
        assert "masks-by-order" not in rules(spec) and guilty(run, "splitting") == 0

    def test_a_split_backward_multiplies_the_recompute(self) -> None:
        policy = Policy.recompute(["1", "2"])
        four = {"stages": (("0",), ("1",), ("2",), ("3",)), "n_microbatches": 4}

        def multipliers(schedule: str) -> tuple[set[str], float]:
            spec, run = pipelined("plain", {**four, "schedule": schedule}, policy)
            assert run is not None and run.failure is None, run
            return rules(spec), max(block.multiplier for block in run.blocks)

        named, multiplier = multipliers("ZBVZeroBubble")
        assert "multiplied-recompute" in named and multiplier > 2
        named, multiplier = multipliers("Interleaved1F1B")
        assert "multiplied-recompute" not in named and multiplier == 2

    def test_reentrant_fails_under_a_split_backward(self) -> None:
        four = {"stages": (("0",), ("1",), ("2",), ("3",)), "n_microbatches": 4, "schedule": "ZBVZeroBubble"}
        spec, run = pipelined("plain", dict(four), Policy.recompute(["1", "2"], use_reentrant=True))
        assert "reentrant-stage" in rules(spec) and run.failure is not None
        spec, run = pipelined("plain", dict(four), Policy.recompute(["1", "2"]))
        assert "reentrant-stage" not in rules(spec)
        assert run is not None and run.failure is None

    @pytest.mark.parametrize(("checkpoint", "n_microbatches"), [("never", 4), ("except_last", 1)])
    def test_a_plan_that_recomputes_nothing(self, checkpoint: str, n_microbatches: int) -> None:
        policy = Policy.recompute(["1"])
        spec, run = pipelined("plain", {"n_microbatches": n_microbatches, "checkpoint": checkpoint}, policy)
        assert "nothing-recomputed" in rules(spec)
        assert run is not None and all(block.n_recompute == 0 for block in run.blocks)
        spec, run = pipelined("plain", {"n_microbatches": n_microbatches, "checkpoint": "always"}, policy)
        assert "nothing-recomputed" not in rules(spec)
        assert run is not None and any(block.n_recompute for block in run.blocks)

    def test_a_tied_weight_over_a_cut_has_two_parts_of_a_gradient(self) -> None:
        spec, run = pipelined("tied", {"n_microbatches": 2})
        assert "shared-across-a-cut" in rules(spec)
        tied = trap_nets.tied()[0]
        copies = [weight.detach().clone().requires_grad_() for weight in (tied.first.weight, tied.last.weight)]
        x = torch.randn(6, trap_nets.WIDTH)
        torch.tanh(x @ copies[0].T).matmul(copies[1].T).square().mean().backward()
        torch.tanh(x @ tied.first.weight.T).matmul(tied.first.weight.T).square().mean().backward()
        whole = tied.first.weight.grad
        assert not torch.allclose(copies[0].grad, whole) and not torch.allclose(copies[1].grad, whole)
        torch.testing.assert_close(copies[0].grad + copies[1].grad, whole)
        assert run is not None, "the explorer's engines add the parts, in another order"
        assert max(shares.splitting.relative_norm or 0.0 for shares in run.gradients) < 1e-6
        uncut, _ = pipelined("tied", {"n_microbatches": 2, "stages": (("first", "middle", "last"),)})
        assert "shared-across-a-cut" not in rules(uncut)

    def test_a_cut_through_a_shared_block_is_refused(self) -> None:
        stages = (("entry", "cell"), ("middle", "exit"))
        spec, run = pipelined("there_and_back", {"n_microbatches": 2, "stages": stages})
        assert "refused-cut" in rules(spec) and run is None

    def test_a_cache_carries_one_microbatch_into_the_next(self) -> None:
        spec, _ = pipelined("cache", {"n_microbatches": 2})
        assert "cache-between-microbatches" in rules(spec)
        attention = trap_nets.NeedsCache()
        first, second = torch.randn(2, 3, trap_nets.WIDTH)
        kept: list[torch.Tensor] = []
        attention(first, past_key_values=kept)
        assert not torch.equal(attention(second, past_key_values=kept), attention(second))
        spec, _ = pipelined("no_cache", {"n_microbatches": 2})
        assert "cache-between-microbatches" not in rules(spec)
