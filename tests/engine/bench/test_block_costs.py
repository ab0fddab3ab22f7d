"""What each block costs: everything below it included, bytes measured, FLOPs counted."""

from __future__ import annotations

from explorer.engine.bench.measure import measure
from explorer.record import Measurement, Policy, RunSpec
from tests.engine.bench.gpt_runs import BLOCKS
from tests.engine.tiny_nets import ref


def test_block_costs_add_up_to_the_headlines(pair: tuple[Measurement, Measurement]) -> None:
    for run in pair:
        root = run.by_fqn[""]
        assert root.at_peak_bytes == run.step_peak_bytes
        assert root.saved_after_forward_bytes == run.saved_after_forward_bytes
        below = [run.by_fqn[fqn] for fqn in BLOCKS]
        assert run.by_fqn["blocks"].saved_after_forward_bytes == sum(cost.saved_after_forward_bytes for cost in below)
        assert run.by_fqn["blocks"].forward_flops == sum(cost.forward_flops for cost in below)


def test_a_block_says_which_blocks_ran_again(pair: tuple[Measurement, Measurement]) -> None:
    baseline, candidate = pair
    assert {cost.n_recompute for cost in baseline.blocks} == {0}
    assert [candidate.by_fqn[fqn].n_recompute for fqn in BLOCKS] == [1, 1, 1, 1]
    assert candidate.by_fqn["head"].n_recompute == 0
    for fqn in BLOCKS:
        few, many = candidate.by_fqn[fqn], baseline.by_fqn[fqn]
        assert few.saved_after_forward_bytes < 0.3 * many.saved_after_forward_bytes


def test_early_stop_skips_the_last_product() -> None:
    """Nothing behind the last Linear saves anything when dropout is 0, so its product is not needed again."""
    model = ref("gpt", dropout=0.0)
    skip = measure(RunSpec(model=model, n_repeats=1, policy=Policy.recompute(BLOCKS)))
    last_linear = 2 * 4 * 32 * (4 * 32) * 32
    assert [skip.by_fqn[fqn].skipped_flops for fqn in BLOCKS] == [last_linear] * 4
    assert skip.by_fqn[""].skipped_flops == 4 * last_linear
    assert skip.recompute_flops == sum(skip.by_fqn[fqn].forward_flops for fqn in BLOCKS) - 4 * last_linear
    whole = measure(RunSpec(model=model, n_repeats=1, policy=Policy.recompute(BLOCKS, early_stop=False)))
    assert whole.by_fqn[""].skipped_flops == 0
