"""The outcome of a run: bits on disk, equal runs of one program, and state that a model carries, listed or hidden."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import msgspec
import pytest

from explorer.engine.compare.compare import compare
from explorer.engine.compare.outcome import N_STEPS, not_reproducible_because, outcome_of, reference
from explorer.engine.compare.probe import ProbedStep, probe, probed_step
from explorer.engine.compare.programs import Outcome
from explorer.engine.compare.spec_program import SpecProgram
from explorer.engine.compare.unit_calls import Inputs
from explorer.engine.model.load import load_for
from explorer.record.comparison import Comparison
from explorer.record.plan import silent
from explorer.record.policy import Policy, Unit
from explorer.record.run import N_PROBES, Optimizer, RunSpec
from tests.engine import carried_nets, hidden_nets
from tests.engine.judging import judged, judged_pair, pair


def outcome(spec: RunSpec, *, full: bool = True) -> Outcome:
    program = SpecProgram(spec, load_for(spec))
    program.start()
    return outcome_of(program, full=full)


def test_running_statistics_change_buffers_alone() -> None:
    comparison = judged("batch_norm", running_stats="every_forward")
    assert comparison.n_bitwise_equal == len(comparison.gradients)
    moved = {diff.name.rpartition(".")[2] for diff in comparison.buffers if diff.verdict == "different"}
    assert moved == {"running_mean", "running_var", "num_batches_tracked"}
    assert comparison.eval_output is not None and comparison.eval_output.verdict == "different"
    counter = next(diff for diff in comparison.buffers if diff.name == "1.trap.num_batches_tracked")
    assert counter.max_abs == 1.0
    assert comparison.reference == "float64", "gradients are equal, and a buffer is not"


@pytest.mark.parametrize(
    ("net", "words"),
    [("another_way_in_float64", "source without a seed"), ("float32_alone", "does not run in float64: RuntimeError")],
)
def test_a_run_that_float64_does_not_repeat_is_no_reference(net: str, words: str) -> None:
    """Numbers of a source that no seed governs are others in float64."""
    spec, _ = pair(net, ("1",))
    exact, because = reference(SpecProgram(spec, load_for(spec)), outcome(spec))
    assert exact is None and words in because
    comparison = judged(net, ("1",))
    assert (comparison.verdict, comparison.no_reference_because) == ("bitwise equal", ""), "no difference needs it"


def test_what_adamw_makes_of_rounding_is_rounding() -> None:
    """A bias before BatchNorm has no gradient in exact arithmetic; AdamW divides what rounding leaves by its size."""
    comparison = judged("lstm_and_batch_norm", ("lstm",), use_reentrant=True)
    far = [diff for diff in comparison.parameters if diff.relative_norm and diff.relative_norm > 1e-4]
    assert far and all(diff.gradients_round for diff in far), "the case is one"
    assert comparison.verdict == "rounding"


def test_two_runs_of_one_spec_leave_the_same_and_name_what_differs() -> None:
    spec, _ = pair("dropout")
    first, again = outcome(spec), outcome(spec)
    assert not_reproducible_because(first, again) == "" and first.n_steps == N_STEPS == len(first.after) == 2
    assert first.parameters is first.after[-1] and set(first.gradients) == first.trained
    other = outcome(msgspec.structs.replace(spec, seed=1))
    assert "gradients (0.weight, 0.bias, " in not_reproducible_because(first, other)


def test_a_parameter_that_forward_moves_is_told_before_any_optimizer() -> None:
    spec, _ = pair("plain")
    program = SpecProgram(spec, load_for(spec))
    program.start()
    program.model.register_forward_pre_hook(lambda module, inputs: module[0].bias.data.add_(1.0))
    quick = outcome_of(program, full=False)
    assert set(quick.moved) == {"0.bias"}
    assert (quick.n_steps, quick.after, quick.parameters, quick.eval_output) == (0, [], {}, None)


def carried(factory: str, block: str = "1", *, optimizer: Optimizer = "adamw", **arguments: object) -> Comparison:
    spec = RunSpec(model=carried_nets.ref(factory, **arguments), optimizer=optimizer)
    return judged_pair(spec, msgspec.structs.replace(spec, policy=Policy.recompute((block,))))


MOVED = {
    "MomentumEncoder": "weight of 1.trap.key", "AverageByData": "weight of 1.trap.key", "TrainedMoved": "",
    "StepRead": "step of 1.trap", "FlipFlop": "flag of 1.trap", "NumpyMean": "mean of 1.trap",
    "FloatMean": "mean of 1.trap", "Queue": "queue of 1.trap", "Counted": "seen of 1.trap",
    "OnTheClass": "OnTheClass.n_calls", "FileGlobal": "N_CALLS", "ClassElsewhere": "Registry.n_calls",
    "GlobalElsewhere": "tests.engine.tiny_nets.N_CALLS", "InSlots": "deep of 1.trap",
    "Unregistered": "hidden of 1.trap", "InClosure": "count of 1.trap", "Draws": "sources of 1.trap",
    "InDefaults": "InDefaults.moves", "OnAFunction": "file_counter", "OnAParameter": "scale itself of 1.trap",
    "OnAList": "history of 1.trap", "Iterated": "schedule of 1.trap", "InAQueue": "counts of 1.trap",
    "SwitchesMode": "mode of 1.trap.idle", "KeepsHooks": "hooks of 1.trap",
}  # fmt: skip
"""The state that each kind moves twice. The verdict of those in DIFFERENT is `different`."""
DIFFERENT = ("TrainedMoved", "StepRead")


def test_every_kind_of_memory_has_its_expectation() -> None:
    assert MOVED.keys() == carried_nets.KINDS.keys()


@pytest.mark.parametrize("kind", DIFFERENT)
def test_memory_that_moves_twice_and_reaches_the_next_step_is_different(kind: str) -> None:
    comparison = carried("memory", kind=kind, right=False)
    assert (comparison.verdict, comparison.reproducible) == ("different", True)
    assert all(diff.bitwise for diff in comparison.gradients)
    assert MOVED[kind] in (*comparison.moved_twice, "")


def all_memories(*, right: bool) -> Comparison:
    spec = RunSpec(model=carried_nets.ref("all_memories", right=right))
    blocks = [str(1 + i) for i in range(len(MOVED))]
    return judged_pair(spec, msgspec.structs.replace(spec, policy=Policy.recompute(blocks)))


def test_memory_that_moves_twice_is_named_kind_by_kind() -> None:
    """All kinds in one model, each with its block."""
    comparison = all_memories(right=False)
    assert comparison.verdict == "different" and comparison.reproducible
    names = [name.replace(" of 1.", f" of {1 + i}.") for i, name in enumerate(MOVED.values()) if name]
    assert not set(names) - set(comparison.moved_twice), comparison.moved_twice


def test_memory_that_moves_once_is_equal_in_every_bit() -> None:
    """What is wrong is named."""
    comparison = all_memories(right=True)
    assert (comparison.moved_twice, comparison.carried, comparison.unjudged) == ((), (), ())
    assert comparison.verdict == "bitwise equal" and comparison.n_carried > len(MOVED)


def test_without_an_optimizer_memory_is_judged_all_the_same() -> None:
    assert carried("memory", kind="FlipFlop", right=False, optimizer="none").verdict == "state moved"
    assert carried("memory", kind="MomentumEncoder", right=True, optimizer="none").verdict == "bitwise equal"


def test_gradients_of_inputs_are_compared() -> None:
    wrong = carried("input_gradient", "noisy", right=False)
    assert (wrong.verdict, [diff.name for diff in wrong.input_gradients]) == ("different", ["inputs"])
    assert all(diff.bitwise for diff in wrong.gradients)
    right = carried("input_gradient", "noisy", right=True)
    assert right.verdict == "bitwise equal" and right.input_gradients[0].bitwise


@pytest.mark.parametrize(
    ("factory", "block", "moved"), [("writes_into_batch", "noisy", "batch"), ("hooked_counter", "1", "")]
)
def test_what_is_written_into_the_batch_or_counted_by_a_hook_is_compared(factory: str, block: str, moved: str) -> None:
    wrong, right = (carried(factory, block, right=right) for right in (False, True))
    assert wrong.verdict == "state moved" and (not moved or wrong.moved_twice == (moved,))
    assert (right.verdict, right.moved_twice) == ("bitwise equal", ())


def test_state_that_every_backward_moves_is_not_charged_to_the_recompute() -> None:
    comparison = carried("counts_backwards")
    assert (comparison.verdict, comparison.state_changes) == ("bitwise equal", ())


@pytest.mark.parametrize("right", [True, False])
def test_an_optimizer_inside_backward_is_judged_by_its_parameters(*, right: bool) -> None:
    comparison = carried("optimizer_in_backward", right=right)
    assert (comparison.n_gradients, comparison.trains_in_backward) == (0, True)
    assert comparison.verdict == ("bitwise equal" if right else "different")


def test_a_copy_without_its_hooks_is_not_judged_as_the_model() -> None:
    comparison = carried("clipped_another_each_time")
    assert comparison.verdict == "not comparable"
    assert all(words in comparison.not_reproducible_because for words in ("hooks on tensors", "weight itself"))
    assert carried("another_each_time").verdict == "bitwise equal", "a copy that lacks nothing is judged"


BLOCKS = ("0", "1", "2")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    os.environ.pop("HIDDEN_NETS_CALLS", None)
    sys.modules.pop("hidden_manager", None)


POLICY = Policy.recompute(BLOCKS)
ENOUGH = hidden_nets.FIRST_CALL + 8
"""Runs that show every effect, however slow the machine is."""


def both_steps(
    kind: str, policy: Policy = POLICY, n_probes: int = N_PROBES, inputs: Inputs = "perturbed"
) -> ProbedStep:
    return probed_step(RunSpec(model=hidden_nets.ref(kind), policy=policy, n_probes=n_probes), None, inputs, silent)


@pytest.mark.parametrize("kind", [hidden.__name__ for hidden in hidden_nets.HIDDEN])
def test_a_late_effect_of_hidden_state_shows(kind: str) -> None:
    probed = both_steps(kind, n_probes=ENOUGH)
    assert probed.first != probed.left and probed.n_runs == ENOUGH


@pytest.mark.parametrize("kind", [harmless.__name__ for harmless in hidden_nets.HARMLESS])
def test_a_block_without_hidden_state_leaves_the_same_step(kind: str) -> None:
    probed = both_steps(kind)
    assert probed.n_runs in (0, N_PROBES), "a number of the spec, not of a clock"
    assert probed.first == probed.left and not probed.unlike


TO_THE_END = Policy.recompute(BLOCKS, early_stop=False)
SEGMENT = Policy.recompute([BLOCKS])
REENTRANT = Policy.recompute(["1", "2"], use_reentrant=True)
NESTED = Policy.recompute(["1", "1.fc"])
OFFLOADED = Policy(units=(Unit(blocks=("1",), action="offload"),))


@pytest.mark.parametrize(
    ("kind", "policy", "moves"),
    [*(("behind_the_last_saved_tensor", policy, True) for policy in (TO_THE_END, SEGMENT, REENTRANT)),
     ("saves_nothing", TO_THE_END, False), ("saves_nothing", SEGMENT, True), ("behind_a_child", NESTED, True),
     ("under_gradients_alone", REENTRANT, True), ("guarded_count", REENTRANT, False),
     ("installed_package", OFFLOADED, False)],
)  # fmt: skip
def test_the_probe_runs_what_the_policy_recomputes(kind: str, policy: Policy, moves: bool) -> None:
    probed = both_steps(kind, policy, ENOUGH)
    assert (probed.first != probed.left) is moves


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [("history_of_maxima", ("1",)), ("latest_maximum", ()), ("refuses_large_inputs", ()), ("guarded_by_stack", ())],
)
def test_inputs_are_perturbed_on_both_sides(kind: str, hidden: tuple[str, ...]) -> None:
    """Equal inputs miss a history. One perturbed side would accuse a block that remembers its latest input."""
    spec = RunSpec(model=hidden_nets.ref(kind))
    result = probe(spec, RunSpec(model=spec.model, policy=POLICY), silent)
    assert (result.hidden_state, result.not_probed_because, result.n_probes) == (hidden, "", N_PROBES)
    equal = both_steps(kind, inputs="equal")
    assert (equal.first == equal.left) == (kind != "latest_maximum"), "equal inputs show no history"


@pytest.mark.parametrize(("kind", "hidden"), [("every_eighth_call", ("1",)), ("restarted_by_each_step", ())])
def test_unlike_recomputes_are_settled_by_real_steps(kind: str, hidden: tuple[str, ...]) -> None:
    probed = both_steps(kind, n_probes=ENOUGH)
    assert probed.first == probed.left and probed.unlike == (("1",),)
    spec = RunSpec(model=hidden_nets.ref(kind), n_probes=ENOUGH)
    assert probe(spec, RunSpec(model=spec.model, n_probes=ENOUGH, policy=POLICY), silent).hidden_state == hidden


def test_a_comparison_names_the_block_and_is_not_green() -> None:
    """Through clean processes: what an earlier run moved in this one is not there."""
    spec = RunSpec(model=hidden_nets.ref("environment"), n_repeats=0, n_probes=ENOUGH)
    policed = RunSpec(model=spec.model, n_repeats=0, n_probes=ENOUGH, policy=POLICY)
    comparison = compare(spec, policed)
    assert comparison.hidden_state == ("1",) and comparison.n_probes == ENOUGH
    assert comparison.verdict == "state moved" and "state that no list names in 1" in comparison.moved_twice


def test_a_model_that_cannot_run_is_no_finding() -> None:
    spec = RunSpec(model=hidden_nets.ref("no such kind"))
    result = probe(spec, RunSpec(model=spec.model, policy=Policy.recompute(BLOCKS)), silent)
    assert not result.hidden_state and result.not_probed_because
