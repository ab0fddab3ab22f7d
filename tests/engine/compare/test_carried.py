"""Whatever a model carries on from step to step: moved twice it is never green, written rightly it is."""

from __future__ import annotations

import msgspec
import pytest

from explorer.record.comparison import Comparison
from explorer.record.policy import Policy
from explorer.record.run import Optimizer, RunSpec
from tests.engine import carried_nets
from tests.engine.judging import judged_pair


def judged(factory: str, block: str = "1", *, optimizer: Optimizer = "adamw", **arguments: object) -> Comparison:
    spec = RunSpec(model=carried_nets.ref(factory, **arguments), optimizer=optimizer)
    return judged_pair(spec, msgspec.structs.replace(spec, policy=Policy.recompute((block,))))


MOVED = {
    "MomentumEncoder": ("state moved", "weight of 1.trap.key"),
    "AverageByData": ("state moved", "weight of 1.trap.key"),
    "TrainedMoved": ("different", ""),
    "StepRead": ("different", "step of 1.trap"),
    "FlipFlop": ("state moved", "flag of 1.trap"),
    "NumpyMean": ("state moved", "mean of 1.trap"),
    "FloatMean": ("state moved", "mean of 1.trap"),
    "Queue": ("state moved", "queue of 1.trap"),
    "Counted": ("state moved", "seen of 1.trap"),
    "OnTheClass": ("state moved", "OnTheClass.n_calls"),
    "FileGlobal": ("state moved", "N_CALLS"),
    "ClassElsewhere": ("state moved", "Registry.n_calls"),
    "GlobalElsewhere": ("state moved", "tests.engine.carried_elsewhere.N_CALLS"),
    "InSlots": ("state moved", "deep of 1.trap"),
    "Unregistered": ("state moved", "hidden of 1.trap"),
    "InClosure": ("state moved", "count of 1.trap"),
    "Draws": ("state moved", "sources of 1.trap"),
    "InDefaults": ("state moved", "InDefaults.moves"),
    "OnAFunction": ("state moved", "file_counter"),
    "OnAParameter": ("state moved", "scale itself of 1.trap"),
    "OnAList": ("state moved", "history of 1.trap"),
    "Iterated": ("state moved", "schedule of 1.trap"),
    "InAQueue": ("state moved", "counts of 1.trap"),
    "SwitchesMode": ("state moved", "mode of 1.trap.idle"),
    "KeepsHooks": ("state moved", "hooks of 1.trap"),
}


def test_every_kind_of_memory_has_its_expectation() -> None:
    assert MOVED.keys() == carried_nets.KINDS.keys()


@pytest.mark.parametrize("kind", MOVED)
def test_memory_that_moves_twice_is_never_green(kind: str) -> None:
    comparison = judged("memory", kind=kind, right=False)
    verdict, name = MOVED[kind]
    assert (comparison.verdict, comparison.reproducible) == (verdict, True)
    assert all(diff.bitwise for diff in comparison.gradients)
    assert not name or name in comparison.moved_twice


@pytest.mark.parametrize("kind", MOVED)
def test_memory_that_moves_once_is_equal_in_every_bit(kind: str) -> None:
    comparison = judged("memory", kind=kind, right=True)
    assert (comparison.verdict, comparison.moved_twice, comparison.carried, comparison.unjudged) == (
        "bitwise equal",
        (),
        (),
        (),
    )
    assert comparison.n_carried > 0


def test_without_an_optimizer_memory_is_judged_all_the_same() -> None:
    assert judged("memory", kind="FlipFlop", right=False, optimizer="none").verdict == "state moved"
    assert judged("memory", kind="MomentumEncoder", right=True, optimizer="none").verdict == "bitwise equal"


def test_gradients_of_inputs_are_compared() -> None:
    wrong = judged("input_gradient", "noisy", right=False)
    assert (wrong.verdict, [diff.name for diff in wrong.input_gradients]) == ("different", ["inputs"])
    assert all(diff.bitwise for diff in wrong.gradients)
    right = judged("input_gradient", "noisy", right=True)
    assert right.verdict == "bitwise equal" and right.input_gradients[0].bitwise


@pytest.mark.parametrize("right", [True, False])
def test_a_batch_that_is_written_into_is_compared(*, right: bool) -> None:
    comparison = judged("writes_into_batch", "noisy", right=right)
    assert (comparison.verdict, comparison.moved_twice) == (
        ("bitwise equal", ()) if right else ("state moved", ("batch",))
    )


@pytest.mark.parametrize("right", [True, False])
def test_what_a_hook_counts_is_compared(*, right: bool) -> None:
    assert judged("hooked_counter", right=right).verdict == ("bitwise equal" if right else "state moved")


@pytest.mark.parametrize("right", [True, False])
def test_an_optimizer_inside_backward_is_judged_by_its_parameters(*, right: bool) -> None:
    comparison = judged("optimizer_in_backward", right=right)
    assert (comparison.n_gradients, comparison.trains_in_backward) == (0, True)
    assert comparison.verdict == ("bitwise equal" if right else "different")


def test_a_copy_without_its_hooks_is_not_judged_as_the_model() -> None:
    comparison = judged("clipped_another_each_time")
    assert comparison.verdict == "not comparable"
    assert (
        "hooks on tensors" in comparison.not_reproducible_because
        and "weight itself" in comparison.not_reproducible_because
    )
    assert judged("another_each_time").verdict == "bitwise equal", "a copy that lacks nothing is judged"
