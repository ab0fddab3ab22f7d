"""What a step leaves behind: two runs of one spec leave the same, and further steps are followed."""

from __future__ import annotations

import msgspec

from explorer.engine.bench.step import prepare
from explorer.engine.compare.outcome import N_STEPS, not_reproducible_because, take
from tests.engine.judging import judged, pair


def test_running_statistics_change_buffers_alone() -> None:
    comparison = judged("batch_norm", running_stats="every_forward")
    assert comparison.n_bitwise_equal == len(comparison.gradients)
    moved = {diff.name.rpartition(".")[2] for diff in comparison.buffers if diff.verdict == "different"}
    assert moved == {"running_mean", "running_var", "num_batches_tracked"}
    assert comparison.eval_output is not None and comparison.eval_output.verdict == "different"
    counter = next(diff for diff in comparison.buffers if diff.name == "1.trap.num_batches_tracked")
    assert counter.max_abs == 1.0


def test_a_model_that_does_not_equal_itself_is_not_comparable() -> None:
    comparison = judged("nondeterministic", ("1",))
    assert (comparison.verdict, comparison.reproducible) == ("not comparable", False)
    assert "6 of 6 gradients (0.weight, 0.bias, 1.linear.weight, …)" in comparison.not_reproducible_because


def test_what_adamw_makes_of_rounding_is_rounding() -> None:
    """A bias before BatchNorm has no gradient in exact arithmetic; AdamW divides what rounding leaves by its size."""
    comparison = judged("lstm_and_batch_norm", ("lstm",), use_reentrant=True)
    far = [diff for diff in comparison.parameters if diff.relative_norm and diff.relative_norm > 1e-4]
    assert far and all(diff.gradients_round for diff in far), "the case is one"
    assert comparison.verdict == "rounding"


def test_further_steps_start_from_the_first() -> None:
    comparison = judged("dropout", preserve_rng_state=False)
    assert comparison.n_steps == 2
    assert {diff.name for diff in comparison.parameters} == {diff.name for diff in comparison.gradients}
    assert any(diff.verdict == "different" for diff in comparison.parameters)


def test_two_runs_of_one_spec_leave_the_same_and_name_what_differs() -> None:
    spec, _ = pair("dropout")
    first, again = (take(prepare(spec)) for _ in range(2))
    assert not_reproducible_because(first, again) == "" and first.n_steps == N_STEPS == len(first.after)
    assert first.parameters is first.after[-1] and set(first.gradients) == first.trained
    other = take(prepare(msgspec.structs.replace(spec, seed=1)))
    assert "gradients (0.weight, 0.bias, " in not_reproducible_because(first, other)


def test_the_quick_form_takes_no_step() -> None:
    outcome = take(prepare(pair("dropout")[0]), full=False)
    assert (outcome.n_steps, outcome.after, outcome.eval_output) == (0, [], None)
    assert outcome.parameters == {} and outcome.moved == {}


def test_a_parameter_that_forward_moves_is_told_before_any_optimizer() -> None:
    spec, _ = pair("plain")
    trainee = prepare(spec)
    trainee.model.register_forward_pre_hook(lambda module, inputs: module[0].bias.data.add_(1.0))
    assert set(take(trainee, full=False).moved) == {"0.bias"}
