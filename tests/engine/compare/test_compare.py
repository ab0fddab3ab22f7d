"""A verdict an expert would sign: planted wrongs are found and named, good policies are equal in every bit."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from explorer.engine.bench import measure, step
from explorer.engine.compare import compare as compare_module
from explorer.engine.compare.compare import compare
from explorer.errors import BadInput, Cancelled
from explorer.record.base import from_msgpack
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelRef
from explorer.record.plan import Progress
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import RunSpec
from tests.engine.judging import judged, pair
from tests.engine.model import test_loaded

KEEP_PRODUCTS = ("aten.addmm.default", "aten.mm.default")

GOOD: list[tuple[str, Any, dict[str, Any]]] = [
    ("dropout", (("1", "2"),), {}),
    ("dropout", ("1", "1.trap", "2"), {}),
    ("dropout", ("1", "2"), {"early_stop": False}),
    ("dropout", ("1", "2"), {"use_reentrant": True}),
    ("dropout", ("1", "2"), {"run": {"mode": "eval"}}),
    ("dropout", ("1", "2"), {"run": {"n_accumulation": 4}}),
    ("dropout", ("1", "2"), {"run": {"optimizer": "sgd", "momentum": 0.9}}),
    ("dropout", ("1", "2"), {"run": {"optimizer": "none"}}),
    ("dropout", ("1", "2"), {"run": {"dtype": "bfloat16"}}),
    ("dropout", ("1", "2"), {"run": {"autocast": "bfloat16"}}),
    ("dropout", ("1", "2"), {"run": {"frozen": ("0",)}}),
    ("dropout", (), {"policy": Policy(units=(Unit(blocks=("1",), action="save_ops", save_ops=KEEP_PRODUCTS),))}),
    ("recurrent_dropout", ("1", "2"), {}),
    ("recurrent_dropout", ("1.cell", "2.cell"), {}),
    ("shared", ("cell",), {}),
]


@pytest.mark.parametrize(("net", "blocks", "options"), GOOD)
def test_good_policies_are_equal_in_every_bit(net: str, blocks: Any, options: dict[str, Any]) -> None:
    comparison = judged(net, blocks, **options)
    assert comparison.failure is None
    assert (comparison.verdict, comparison.reproducible, comparison.causes) == ("bitwise equal", True, ())
    assert comparison.n_bitwise_equal == len(comparison.gradients) > 0
    assert all(not mask.n_mismatched for mask in comparison.masks)


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
    last = comparison.causes[-1]
    assert last.startswith({"nan": "NaN or infinity", "missing": "No gradient came"}.get(wrong, "Look first at the "))
    if wrong in ("scaled", "permuted"):
        assert f"the recompute of 2. In the model's order {worst} is the last gradient that differs" in last


WRONG: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "planted wrong=scaled": (("1", "2"), {}, "different", "Looked at and equal: the positions of "),
    "planted wrong=missing": (("1", "2"), {"full": False}, "different", "No gradient came"),
    "planted wrong=nan": (("1", "2"), {"full": False}, "different", "NaN or infinity"),
    "dropout": (
        (("1", "2"),), {"preserve_rng_state": False}, "different", "The dropout mask differs in 1.trap, 2.trap"
    ),
    "recurrent_dropout": (
        ("1", "2"), {"preserve_rng_state": False}, "different", "The dropout mask differs in 1.cell.trap"
    ),
    "noise source=own": (("1", "2"), {}, "different", "The random numbers differ in 1.trap, 2.trap"),
    "flips": (
        ("block",), {"use_reentrant": True}, "different",
        "block.trap drew in forward and not again, though the recompute",
    ),
    "carries": (
        ("1",), {}, "different", "Known before the run: The forward of 1 changes an attribute of the module"
    ),
    "observes": (
        ("1",), {"run": {"autocast": "bfloat16"}}, "different", "The recompute changed the buffer scale of 1 a second"
    ),
    "counter": (("1",), {"full": False}, "state moved", ""),
    "plain_counter": (("1",), {"full": False}, "state moved", ""),
}  # fmt: skip
"""Net -> blocks, options, verdict, begin of the first cause. The quick form finds what is missing, NaN or moved."""


@pytest.mark.parametrize("net", WRONG)
def test_a_wrong_policy_has_its_verdict_and_its_cause_comes_first(net: str) -> None:
    blocks, options, verdict, cause = WRONG[net]
    comparison = judged(net, blocks, **options)
    assert comparison.verdict == verdict
    assert comparison.causes[0].startswith(cause)
    if not options.get("full", True):
        assert (comparison.reproducible, comparison.reference, comparison.n_steps) == (None, "none", 0)


@pytest.mark.slow  # the process compiles
def test_a_compiled_block_is_equal_in_every_bit() -> None:
    """Tracing leaves marks of torch's on the parameters."""
    ref = ModelRef(f"{test_loaded.__file__}:compiled", arguments={"place": "block"})
    candidate = RunSpec(ref, Policy.recompute(("0", "1")), n_repeats=0)
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


@pytest.mark.parametrize(("net", "block", "words"), [
    ("cache", "attention", "The recompute of attention made another tensor than forward"),
    ("in_place", "1", "modified by an inplace operation"),
])  # fmt: skip
def test_a_candidate_that_raises_is_a_result(net: str, block: str, words: str) -> None:
    comparison = judged(net, (block,))
    assert comparison.verdict == "not comparable"
    assert comparison.failure is not None and words in comparison.failure.sentence


def test_causes_name_what_was_looked_at() -> None:
    cause, where = judged("planted wrong=scaled").causes
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


def test_a_raised_recompute_is_said_in_the_same_words_everywhere() -> None:
    failure = judged("flips", ("block",)).failure
    assert failure is not None and failure.sentence.startswith("The recompute of block did other work than forward")
    assert failure.hint == "The traceback shows the line of the library that raised it."


class TestWholeCompare:
    def test_it_records_judges_and_times_in_19_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reports: list[Progress] = []
        steps: list[object] = []
        monkeypatch.setattr(measure, "HOOKS_SHARE", math.inf)
        plain = step.accumulate_gradients
        monkeypatch.setattr(step, "accumulate_gradients", lambda *of: steps.append(of) or plain(*of))
        comparison = compare(*pair("dropout", run={"n_repeats": 5}), report=reports.append)
        assert len(steps) <= 19, "whole steps in this process; the probe for hidden state has its own"
        recorded, judged = [from_msgpack(progress.part, Comparison) for progress in reports if progress.part]
        assert recorded.verdict == "not comparable" and judged.verdict == "bitwise equal" and not judged.baseline.times
        assert recorded.candidate.step_peak_bytes == judged.candidate.step_peak_bytes
        runs = (comparison.baseline, comparison.candidate)
        judged = msgspec.structs.replace(judged, baseline=runs[0], candidate=runs[1])
        assert judged == comparison and comparison.reproducible
        for run, n_recompute in zip(runs, (0, 1)):
            assert run.times is not None and len(run.times.step.ms) == len(run.times.optimizer.ms) == 5
            assert len(run.by_fqn["1"].forward.ms) == 2 and run.by_fqn["1"].n_recompute == n_recompute
            assert run.peaks.alone_peak_bytes == pytest.approx(run.step_peak_bytes, rel=0.005)
        assert all(0 <= progress.done <= progress.total for progress in reports)
        assert [progress.done for progress in reports] == sorted(progress.done for progress in reports)

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
        with pytest.raises(BadInput, match=r"seed: 0 and 7; mode: 'train' and 'eval'"):
            compare(baseline, other)

    def test_cancelled_passes_through(self) -> None:
        def cancel(progress: Progress) -> None:
            if "gradients" in progress.what:
                raise Cancelled("The run was cancelled.")

        with pytest.raises(Cancelled):
            compare(*pair("dropout"), report=cancel)
