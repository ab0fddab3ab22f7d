"""Attribution's raw material: calls, phases, FLOPs by block, and a stack that is balanced whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from explorer.engine.bench.recording import tracker_of
from explorer.engine.bench.step import Trainee, prepare, run_step
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.watch.tracker import BACKWARD, FORWARD, OP_COLUMNS, RECOMPUTE, Tracker
from explorer.record import Policy, RunSpec, Unit
from tests.engine.tiny_nets import ref

BLOCKS = [f"blocks.{i}" for i in range(4)]
MODES = {
    "keep": Policy(),
    "all": Policy.recompute(BLOCKS),
    "mixed": Policy.recompute(BLOCKS[::2]),
    "reentrant": Policy.recompute(BLOCKS[1:], use_reentrant=True),
    "no early stop": Policy.recompute(BLOCKS, early_stop=False),
    "nested": Policy.recompute([*BLOCKS, *(f"{block}.mlp" for block in BLOCKS)]),
}


def watched(policy: Policy = Policy(), factory: str = "gpt", **arguments: Any) -> tuple[Trainee, Tracker]:  # noqa: B008
    """One step under the tracker, after one without."""
    trainee = prepare(RunSpec(model=ref(factory, **arguments), policy=policy))
    run_step(trainee)
    tracker = tracker_of(trainee)
    with tracker:
        run_step(trainee, tracker.on_phase)
    return trainee, tracker


def by_block(tracker: Tracker, phase: int) -> dict[str, int]:
    return {tracker.fqns[block]: n for (p, block), n in tracker.flops.items() if p == phase}


@pytest.mark.parametrize("mode", MODES)
def test_the_stack_is_balanced_after_the_step(mode: str) -> None:
    with preserve_global_state():
        _, tracker = watched(MODES[mode])
    assert tracker.scopes.frame.stack == [0]
    assert tracker.scopes.frame.reruns == []


@pytest.mark.parametrize("mode", MODES)
def test_the_model_is_left_as_found(mode: str) -> None:
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("gpt"), policy=MODES[mode]))
        before = hooks(trainee)
        tracker = tracker_of(trainee)
        with tracker:
            run_step(trainee, tracker.on_phase)
    assert hooks(trainee) == before


def hooks(trainee: Trainee) -> list[int]:
    modules = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in trainee.model.modules()]
    return modules + [len(p._post_accumulate_grad_hooks or {}) for p in trainee.model.parameters()]


def test_the_stack_is_balanced_after_an_exception_in_forward() -> None:
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("raises")))
        tracker = tracker_of(trainee)
        with pytest.raises(ValueError, match="does not fit"), tracker:
            run_step(trainee, tracker.on_phase)
    assert tracker.scopes.frame.stack == [0]
    assert sum(hooks(trainee)) == 0


def test_blocks_say_how_often_they_ran() -> None:
    with preserve_global_state():
        _, tracker = watched(Policy.recompute(["blocks.1", "blocks.3"]))
    counts = dict(zip(tracker.fqns, zip(tracker.n_forward, tracker.n_recompute)))
    assert [counts[block] for block in BLOCKS] == [(1, 0), (1, 1), (1, 0), (1, 1)]
    assert counts["blocks.1.mlp"] == (1, 1)
    assert counts["blocks.0.mlp"] == (1, 0)
    assert counts[""] == (1, 0)


def test_a_shared_block_runs_again_once_a_call() -> None:
    with preserve_global_state():
        _, tracker = watched(Policy.recompute(["cell"]), "shared")
    assert dict(zip(tracker.fqns, zip(tracker.n_forward, tracker.n_recompute)))["cell"] == (6, 6)


def test_a_segment_runs_each_of_its_blocks_again_once() -> None:
    policy = Policy(units=(Unit(blocks=("1", "2")),))
    with preserve_global_state():
        _, tracker = watched(policy, "chain")
    assert [tracker.n_recompute[tracker.fqns.index(fqn)] for fqn in ("0", "1", "2", "3")] == [0, 1, 1, 0]


def test_backward_flops_belong_to_the_block_that_ran_forward() -> None:
    """A Linear's backward is two products of the size of its forward; the first one needs no input gradient."""
    with preserve_global_state():
        _, tracker = watched(factory="chain")
    forward, backward = by_block(tracker, FORWARD), by_block(tracker, BACKWARD)
    assert forward == {f"{i}.0": 2 * 8 * 16 * 16 for i in range(4)}
    assert backward == {f"{i}.0": (2 if i else 1) * 2 * 8 * 16 * 16 for i in range(4)}


@pytest.mark.parametrize("mode", MODES)
def test_backward_flops_do_not_depend_on_the_policy(mode: str) -> None:
    with preserve_global_state():
        plain, again = watched()[1], watched(MODES[mode])[1]
    assert by_block(plain, FORWARD) == by_block(again, FORWARD)
    if mode != "reentrant":
        assert by_block(plain, BACKWARD) == by_block(again, BACKWARD)
    assert sum(by_block(plain, BACKWARD).values()) == sum(by_block(again, BACKWARD).values())


@pytest.mark.parametrize("mode", MODES)
def test_all_flops_agree_with_torchs_own_counter(mode: str) -> None:
    with preserve_global_state():
        trainee, tracker = watched(MODES[mode])
        with FlopCounterMode(display=False) as counter:
            run_step(trainee)
    assert sum(tracker.flops.values()) == counter.get_total_flops()


def test_recompute_flops_are_those_of_the_chosen_blocks_alone() -> None:
    with preserve_global_state():
        _, tracker = watched(Policy.recompute(["blocks.2"], early_stop=False))
    assert by_block(tracker, RECOMPUTE) == {
        fqn: n for fqn, n in by_block(tracker, FORWARD).items() if fqn.startswith("blocks.2")
    }


def test_what_is_made_from_pythons_numbers_is_seen_and_its_views_are_not_noted() -> None:
    numbers = list(range(1000))
    with Tracker(torch.nn.Identity(), torch.device("cpu")) as tracker:
        made = torch.tensor(numbers)
        _ = made.view(10, 100).t()[3]
    assert list(tracker.storages.n_bytes) == [made.nbytes]
    assert {tracker.op_names[op] for op in tracker.ops[:: len(OP_COLUMNS)]} == {"aten.lift_fresh.default"}
