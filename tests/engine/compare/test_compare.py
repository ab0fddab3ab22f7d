"""A verdict an expert would sign: planted wrongs are found and named, good policies are equal in every bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from explorer.engine.bench import measure, step
from explorer.engine.compare import compare as compare_module
from explorer.engine.compare import spec_program
from explorer.engine.compare.compare import compare
from explorer.errors import BadInput, Cancelled
from explorer.record.base import from_msgpack
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelRef
from explorer.record.plan import Progress
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import N_REPEATS, RunSpec
from tests.engine.judging import judged, judged_pair, pair
from tests.engine.model import test_loaded

KEEP_PRODUCTS = ("aten.addmm.default", "aten.mm.default")

BOTH, SEGMENT, NO_STASH, REENTRANT = ("1", "2"), (("1", "2"),), {"preserve_rng_state": False}, {"use_reentrant": True}
SAVE_OPS = Policy(units=(Unit(blocks=("1",), action="save_ops", save_ops=KEEP_PRODUCTS),))
LSTM = "Reentrant checkpointing runs forward without gradients, where torch may choose other kernels."
EQUAL: list[tuple[str, Any, dict[str, Any]]] = [
    ("dropout", SEGMENT, {}),
    ("dropout", ("1", "1.trap", "2"), {}),
    ("dropout", BOTH, {"early_stop": False}),
    ("dropout", BOTH, REENTRANT),
    ("dropout", (), {"policy": SAVE_OPS}),
    ("recurrent_dropout", BOTH, {}),
    ("recurrent_dropout", ("1.cell", "2.cell"), {}),
    ("shared", ("cell",), {}),
    ("noise_in_own_type", BOTH, {}),
    *(("dropout", BOTH, {"run": run}) for run in (
        {"mode": "eval"}, {"n_accumulation": 4}, {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "none"},
        {"dtype": "bfloat16"}, {"autocast": "bfloat16"}, {"frozen": ("0",)},
    )),
]  # fmt: skip


@pytest.mark.parametrize(("net", "blocks", "options"), EQUAL)
def test_good_policies_are_equal_in_every_bit(net: str, blocks: Any, options: dict[str, Any]) -> None:
    """A sampling model too: torch.rand_like draws other numbers in float64, and the reference draws the baseline's."""
    comparison = judged(net, blocks, **options)
    assert comparison.failure is None
    assert (comparison.verdict, comparison.reproducible, comparison.causes) == ("bitwise equal", True, ())
    assert comparison.n_bitwise_equal == len(comparison.gradients) > 0
    assert all(not mask.n_mismatched for mask in comparison.masks) and comparison.reference == "none"


VERDICTS: list[tuple[str, Any, dict[str, Any], str, str]] = [
    ("planted wrong=scaled", BOTH, {}, "different", "Looked at and equal: the positions of "),
    ("planted wrong=missing", BOTH, {"full": False}, "different", "No gradient came"),
    ("planted wrong=nan", BOTH, {"full": False}, "different", "NaN or infinity"),
    ("dropout", SEGMENT, NO_STASH, "different", "The dropout mask differs in 1.trap, 2.trap"),
    ("recurrent_dropout", BOTH, NO_STASH, "different", "The dropout mask differs in 1.cell.trap"),
    ("noise source=own", BOTH, {}, "different", "The random numbers differ in 1.trap, 2.trap"),
    ("flips", ("block",), REENTRANT, "different", "block.trap drew in forward and not again, though the recompute"),
    ("carries", ("1",), {}, "different", "Known before the run: The forward of 1 changes an attribute of the module"),
    ("observes", ("1",), {"run": {"autocast": "bfloat16"}}, "different",
     "The recompute changed the buffer scale of 1 a second"),
    ("counter", ("1",), {"full": False}, "state moved", ""),
    ("plain_counter", ("1",), {"full": False}, "state moved", ""),
    # The fused kernel of a forward without gradients rounds differently.
    ("lstm", ("lstm",), REENTRANT, "rounding", LSTM),
    ("sampled_lstm", ("lstm",), REENTRANT, "rounding", LSTM),
    ("cache", ("attention",), {}, "not comparable", "The recompute of attention made another tensor than forward"),
    ("flips", ("block",), {}, "not comparable", "The recompute of block did other work than forward"),
    ("in_place", ("1",), {}, "not comparable", "modified by an inplace operation"),
    ("nondeterministic", ("1",), {}, "not comparable",
     "differ in 6 of 6 gradients (0.weight, 0.bias, 1.linear.weight, …)"),
    ("noisy_in_eval", ("1",), {}, "not comparable", "differ in the output in eval mode."),
]  # fmt: skip
"""Net, blocks, options, verdict and reason. The quick form, without `full`, finds what is missing, NaN or moved."""


@pytest.mark.parametrize(("net", "blocks", "options", "verdict", "words"), VERDICTS)
def test_each_verdict_comes_with_its_reason(
    net: str, blocks: Any, options: dict[str, Any], verdict: str, words: str
) -> None:
    comparison = judged(net, blocks, **options)
    assert comparison.verdict == verdict
    failure = comparison.failure.sentence if comparison.failure else ""
    reasons = (failure, comparison.not_reproducible_because, comparison.no_reference_because, *comparison.causes[:1])
    assert any(words in reason for reason in reasons)
    if verdict == "rounding":
        assert comparison.n_bitwise_equal < len(comparison.gradients)
    if verdict in ("rounding", "different") and "full" not in options:
        assert comparison.reference == "float64" or comparison.no_reference_because, "a difference needs the scale"
    if "full" in options:
        assert (comparison.reproducible, comparison.reference, comparison.n_steps) == (None, "none", 0)


@pytest.mark.parametrize(
    ("wrong", "worst"),
    [("scaled", "2.linear.weight"), ("permuted", "2.linear.bias"), ("missing", "2.linear.weight"),
     ("nan", "2.linear.weight")],
)  # fmt: skip
def test_one_planted_wrong_gradient_is_found_and_named(wrong: str, worst: str) -> None:
    comparison = judged(f"planted wrong={wrong}")
    assert comparison.verdict == "different"
    assert comparison.loss_equal, "the loss never shows it"
    assert [diff.name for diff in comparison.gradients if diff.verdict != "bitwise equal"] == [worst]
    assert comparison.worst is not None and comparison.worst.name == worst
    last = comparison.causes[-2]  # the departure of the recompute stands behind it
    assert last.startswith({"nan": "NaN or infinity", "missing": "No gradient came"}.get(wrong, "Look first at the "))
    if wrong in ("scaled", "permuted"):
        assert f"the recompute of 2. In the model's order {worst} is the last gradient that differs" in last


@pytest.mark.slow  # the process compiles
def test_a_compiled_block_is_equal_in_every_bit() -> None:
    """Tracing leaves marks of torch's on the parameters."""
    ref = ModelRef(target=f"{test_loaded.__file__}:compiled", arguments={"place": "block"})
    candidate = RunSpec(model=ref, policy=Policy.recompute(("0", "1")), n_repeats=0)
    comparison = compare(msgspec.structs.replace(candidate, policy=KEEP_ALL), candidate)
    assert (comparison.verdict, comparison.hidden_state) == ("bitwise equal", ())
    assert comparison.n_probes and not comparison.not_probed_because


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_state_in_float32_is_held_against_its_own_type_where_all_gradients_are_equal(autocast: str) -> None:
    """Under autocast the observer's own distance from float64 is larger than what moving it twice makes."""
    comparison = judged("extremes", ("1",), run={"autocast": autocast})
    assert comparison.n_bitwise_equal == comparison.n_gradients
    assert (comparison.verdict, comparison.moved_twice) == ("state moved", ("largest of 1",))


def test_a_plain_counter_moves_though_no_tensor_shows_it() -> None:
    comparison = judged("plain_counter", ("1",))
    assert (comparison.verdict, comparison.moved_twice) == ("state moved", ("n_forwards of 1.trap",))
    (change,) = comparison.state_changes
    assert (change.block, change.name, change.kind) == ("1.trap", "n_forwards", "attribute")
    assert (change.after_forward, change.after_backward) == ("1", "2")
    assert judged("plain_counter ask=True", ("1",)).state_changes == ()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_mismatched_masks_are_those_of_two_independent_draws(share: float) -> None:
    """2 p (1 - p) of the elements differ; torch keeps the same count of draws, so the bound is binomial."""
    comparison = judged(f"many_dropouts p={share}", preserve_rng_state=False)
    n_elements = sum(mask.n_elements for mask in comparison.masks)
    n_mismatched = sum(mask.n_mismatched for mask in comparison.masks)
    expected = 2 * share * (1 - share)
    assert n_elements == 2 * 64 * 64
    assert n_mismatched / n_elements == pytest.approx(expected, abs=5 * (expected / n_elements) ** 0.5)


def test_a_raised_recompute_names_the_traceback() -> None:
    failure = judged("flips", ("block",)).failure
    assert failure is not None and failure.hint == "The traceback shows the line of the library that raised it."


def test_causes_name_what_was_looked_at() -> None:
    cause, where, departs = judged("planted wrong=scaled").causes
    assert departs.startswith("The recompute first departs from forward at") and "trap_nets.py:" in departs
    assert where.startswith("Look first at the recompute of 2.") and "values that the model remembers" in cause
    cause, _ = judged("planted wrong=scaled", full=False).causes
    assert "Random numbers in forward and recompute were not watched" in cause


def test_random_numbers_that_nobody_held_side_by_side_are_not_called_equal() -> None:
    for net, blocks, options in [("flips", ("block",), {"use_reentrant": True}), ("overwritten", ("1", "2"), {})]:
        comparison = judged(net, blocks, **options)
        assert sum(mask.n_elements for mask in comparison.masks) == 0 < len(comparison.masks)
        assert "drawn again in" not in " ".join(comparison.causes)


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop_is_not_blamed_where_the_gradients_are_as_wrong_without_it(early_stop: bool) -> None:
    comparison = judged("overwritten", ("1", "2"), early_stop=early_stop)
    assert comparison.equal_without_early_stop is (False if early_stop else None)
    assert comparison.causes and not any("early stop" in cause for cause in comparison.causes)


@pytest.mark.parametrize("how", ["saves", "raises"])
def test_a_run_for_evidence_that_fails_leaves_the_verdict_to_the_tensors(how: str) -> None:
    comparison = judged(f"saves_more_later how={how}", ("1",))
    assert (comparison.verdict, comparison.failure) == ("different", None)
    assert comparison.masks_watched and comparison.equal_without_early_stop is False
    assert any("With early_stop off the step fails" in cause for cause in comparison.causes)


def test_a_watched_step_that_fails_is_no_failure_of_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*of: object) -> None:
        raise RuntimeError("no watch")

    monkeypatch.setattr(spec_program, "RerunWatch", fails)
    comparison = judged_pair(*pair("planted wrong=scaled"))
    assert (comparison.verdict, comparison.masks_watched) == ("different", False)


class TestWholeCompare:
    def test_it_records_judges_and_times_in_14_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reports: list[Progress] = []
        steps: list[object] = []
        monkeypatch.setattr(measure, "HOOKS_SHARE", math.inf)
        plain = step.accumulate_gradients
        monkeypatch.setattr(step, "accumulate_gradients", lambda *of: steps.append(of) or plain(*of))
        comparison = compare(*pair("dropout", run={"n_repeats": N_REPEATS}), report=reports.append)
        assert len(steps) <= 14, "whole steps in this process; the probe for hidden state has its own"
        assert f"takes {len(steps)} whole steps" in Path("docs/equality.md").read_text()
        recorded, judged = [from_msgpack(progress.part, Comparison) for progress in reports if progress.part]
        assert recorded.verdict == "not comparable" and judged.verdict == "bitwise equal" and not judged.baseline.times
        assert recorded.candidate.step_peak_bytes == judged.candidate.step_peak_bytes
        runs = (comparison.baseline, comparison.candidate)
        judged = msgspec.structs.replace(judged, baseline=runs[0], candidate=runs[1])
        assert judged == comparison and comparison.reproducible
        for run, n_recompute in zip(runs, (0, 1)):
            assert run.times is not None and len(run.times.step.ms) == len(run.times.optimizer.ms) == N_REPEATS
            assert len(run.by_fqn["1"].forward.ms) == 2 and run.by_fqn["1"].n_recompute == n_recompute
            assert run.peaks.alone_peak_bytes == pytest.approx(run.step_peak_bytes, rel=0.005)
        assert all(0 <= progress.done <= progress.total for progress in reports)
        assert [progress.done for progress in reports] == sorted(progress.done for progress in reports)
        probed = [progress for progress in reports if progress.done == 0]
        assert len(probed) > 1 and len(set(probed)) == 1, "the probe's process is the first step"

    def test_a_peak_far_from_the_recorded_one_is_read_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def begun(trainee: Any, times: Any, peaks: Any) -> measure.BegunSteps:
            return measure.BegunSteps(trainee, times, [2 * peak for peak in peaks])

        monkeypatch.setattr(compare_module, "BegunSteps", begun)
        comparison = compare(*pair("dropout"))
        for run in (comparison.baseline, comparison.candidate):
            assert run.peaks.alone_peak_bytes == pytest.approx(run.step_peak_bytes, rel=0.005) and not run.warnings

    @pytest.mark.parametrize(
        ("net", "options"),
        [("dropout", {"preserve_rng_state": False}), ("plain_counter", {"run": {"optimizer": "none"}})],
    )
    def test_masks_and_state_seen_in_the_warm_up_are_those_of_a_separate_step(
        self, net: str, options: dict[str, Any]
    ) -> None:
        shared, separate = compare(*pair(net, ("1",), **options)), judged(net, ("1",), **options)
        assert (shared.masks, shared.state_changes) == (separate.masks, separate.state_changes)
        assert shared.masks_watched and (any(mask.n_mismatched for mask in shared.masks) or shared.state_changes)

    def test_a_failing_candidate_keeps_the_baseline_and_global_state_is_restored(self) -> None:
        torch.manual_seed(3)
        state, n_threads = torch.get_rng_state(), torch.get_num_threads()
        comparison = compare(*pair("cache", ("attention",)))
        assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == n_threads
        assert comparison.failure is not None and comparison.verdict == "not comparable"
        assert comparison.failure.sentence.startswith("In the candidate: ")
        assert comparison.baseline.step_peak_bytes

    def test_specs_that_differ_in_more_than_policy_are_refused(self) -> None:
        baseline, candidate = pair("dropout")
        other = RunSpec(model=baseline.model, policy=candidate.policy, seed=7, mode="eval")
        with pytest.raises(BadInput, match=r"mode: 'train' and 'eval'; seed: 0 and 7"):
            compare(baseline, other)

    def test_cancelled_passes_through(self) -> None:
        def cancel(progress: Progress) -> None:
            if "gradients" in progress.what:
                raise Cancelled("The run was cancelled.")

        with pytest.raises(Cancelled):
            compare(*pair("dropout"), report=cancel)
