"""A tracked step: phases and FLOPs by block, storages, calls, sums of gradients, and a stack that is balanced."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from explorer.engine.bench.recording import record, tracker_of
from explorer.engine.bench.step import Trainee, prepare, run_step
from explorer.engine.device.allocator import CpuRecorder
from explorer.engine.model.load import load
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.watch import tracker
from explorer.engine.watch.gradient_sums import ADD, references_of_the_last_holder, sum_of_gradients
from explorer.engine.watch.tracker import BACKWARD, FORWARD, OP_COLUMNS, RECOMPUTE, Tracker
from explorer.plan.predict.replay import Call, Replay
from explorer.record import Allocations, ModelRef, Policy, RunSpec
from tests.engine.tiny_nets import ref
from tests.view.builders import measured

BLOCKS = [f"blocks.{i}" for i in range(4)]
MODES = {
    "keep": Policy(),
    "all": Policy.recompute(BLOCKS),
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


@cache
def kept() -> Tracker:
    return watched()[1]


def by_block(tracker: Tracker, phase: int) -> dict[str, int]:
    return {tracker.fqns[block]: n for (p, block), n in tracker.flops.items() if p == phase}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_under_the_tracker(mode: str) -> None:
    """The stack is balanced, no hook stays, FLOPs are torch's, and no policy changes those of forward and backward."""
    with preserve_global_state():
        plain = kept()
        trainee, tracker = watched(MODES[mode])
        before = hooks(prepare(RunSpec(model=ref("gpt"), policy=MODES[mode])))
        with FlopCounterMode(display=False) as counter:
            run_step(trainee)
    assert tracker.scopes.frame.stack == [0] and tracker.scopes.frame.reruns == []
    assert hooks(trainee) == before
    assert sum(tracker.flops.values()) == counter.get_total_flops()
    assert by_block(plain, FORWARD) == by_block(tracker, FORWARD)
    if mode != "reentrant":
        assert by_block(plain, BACKWARD) == by_block(tracker, BACKWARD)
    assert sum(by_block(plain, BACKWARD).values()) == sum(by_block(tracker, BACKWARD).values())


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


def test_a_recompute_in_a_backward_that_nobody_announces_is_no_forward() -> None:
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("chain"), policy=Policy.recompute(["1"])))
        with tracker_of(trainee) as tracker:
            tracker.on_phase("forward")
            torch.autograd.grad(trainee.model(trainee.inputs).sum(), list(trainee.model.parameters()))
    assert {tracker.fqns[block] for phase, block in tracker.flops if phase == RECOMPUTE} == {"1.0"}
    assert [tracker.n_forward[tracker.fqns.index("1")], tracker.n_recompute[tracker.fqns.index("1")]] == [1, 1]


class OwnCheckpoint(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run: Callable[..., torch.Tensor] = checkpoint
        return run(self.layer, x.sin(), use_reentrant=False)


def reruns(watching: Tracker) -> list[tuple[str, str]]:
    """The unit that runs again, and the innermost block, at each change inside a recompute."""
    rows = zip(watching.scenes[1::4], watching.scenes[2::4], watching.scenes[3::4])
    return [(watching.fqns[rerun], watching.fqns[block]) for phase, rerun, block in rows if phase == RECOMPUTE]


def test_all_of_a_models_own_rerun_belongs_to_its_outermost_block() -> None:
    model = OwnCheckpoint()
    with Tracker(model, torch.device("cpu")) as watching:
        watching.on_phase("forward")
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        watching.on_phase("backward")
        loss.backward()
    found = reruns(watching)
    assert {rerun for rerun, _ in found} == {"layer"}
    assert {block for _, block in found} == {"layer", "layer.0", "layer.0.0", "layer.1"}
    counts = dict(zip(watching.fqns, zip(watching.n_forward, watching.n_recompute)))
    assert counts == {"": (1, 0), **dict.fromkeys(("layer", "layer.0", "layer.0.0", "layer.1"), (1, 1))}


def test_a_rerun_inside_another_belongs_to_the_inner_unit() -> None:
    """As second order does it."""
    with Tracker(OwnCheckpoint(), torch.device("cpu")) as watching:
        watching.on_phase("backward")
        for fqn, begins in (("layer", True), ("layer.0", True), ("layer.0", False), ("layer", False)):
            watching.scopes._rerun(fqn, begins)
    assert [rerun for rerun, _ in reruns(watching)][:2] == ["layer", "layer.0"]


def test_a_border_lies_in_five_microseconds_of_quiet_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the clock of the allocator cannot put an event on the other side. A look at it takes 100 ns."""
    clock = itertools.count(0, 100).__next__
    with Tracker(torch.nn.Identity(), torch.device("cpu")) as watching:
        monkeypatch.setattr(tracker, "time_ns", clock)
        before_ns = clock()
        watching.on_phase("backward")
        after_ns = clock()
        monkeypatch.undo()
    border_ns, phase, *_ = watching.scenes[-4:]
    assert phase == BACKWARD
    assert 5_000 <= border_ns - before_ns < 5_500 and 5_000 <= after_ns - border_ns < 5_500


def test_backward_flops_belong_to_the_block_that_ran_forward() -> None:
    """A Linear's backward is two products of the size of its forward; the first one needs no input gradient."""
    with preserve_global_state():
        _, tracker = watched(factory="chain")
    forward, backward = by_block(tracker, FORWARD), by_block(tracker, BACKWARD)
    assert forward == {f"{i}.0": 2 * 8 * 16 * 16 for i in range(4)}
    assert backward == {f"{i}.0": (2 if i else 1) * 2 * 8 * 16 * 16 for i in range(4)}


def test_what_is_made_from_pythons_numbers_is_seen_and_its_views_are_not_noted() -> None:
    numbers = list(range(1000))
    with Tracker(torch.nn.Identity(), torch.device("cpu")) as tracker:
        made = torch.tensor(numbers)
        _ = made.view(10, 100).t()[3]
    assert list(tracker.storages.n_bytes) == [made.nbytes]
    assert {tracker.op_names[op] for op in tracker.ops[:: len(OP_COLUMNS)]} == {"aten.lift_fresh.default"}


def test_a_resized_storage_is_followed() -> None:
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("chain")))
        tracker = tracker_of(trainee)
        with tracker:
            held = torch.empty(10)
            held.resize_(1000)
    assert [n for n in tracker.storages.n_bytes[tracker.storages.n_before_step :]] == [40, 4000]
    assert list(tracker.storages.turns[tracker.storages.n_before_step :]) == [
        tracker.storages.n_before_step + 1,
        -tracker.storages.n_before_step - 1,
        tracker.storages.n_before_step + 2,
    ]


class Sums(TorchDispatchMode):
    """Adds gradients as the tracker does, and notes which sums took no storage of their own."""

    def __init__(self) -> None:
        super().__init__()
        references_of_the_last_holder()  # measured outside of any backward, as the tracker does
        self.in_place: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ADD and not torch.is_grad_enabled():
            total = sum_of_gradients(args, kwargs or {})
            self.in_place.append(total is not None)
            if total is not None:
                return total
        return func(*args, **(kwargs or {}))


def test_this_torch_can_tell_the_last_holder() -> None:
    assert references_of_the_last_holder() is not None


def test_a_value_used_three_times_is_summed_in_place_to_the_same_bits() -> None:
    def backward(x: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(0, 1, 9).reshape(3, 3).requires_grad_()
        (x @ weight @ weight @ weight).square().sum().backward()
        return weight.grad

    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    expected = backward(x)
    with Sums() as sums:
        assert torch.equal(backward(x), expected)
    assert sums.in_place == [True, True]


@pytest.mark.parametrize("kept", [True, False])
def test_a_gradient_that_a_hook_keeps_is_not_written(kept: bool) -> None:
    held: list[torch.Tensor] = []
    weight = torch.ones(3, requires_grad=True)
    parts = [weight * 2, weight * 3]
    if kept:
        for part in parts:
            part.grad_fn.register_hook(lambda given, _: held.append(given[0]))
    with Sums() as sums:
        sum(part.sum() for part in parts).backward()
    assert sums.in_place == [not kept] and weight.grad.tolist() == [5.0] * 3
    assert sorted(one.tolist() for one in held) == ([[2.0] * 3, [3.0] * 3] if kept else [])


def test_what_differs_in_shape_or_type_is_added_as_asked() -> None:
    with torch.no_grad():
        assert sum_of_gradients((torch.ones(2), torch.ones(1)), {}) is None
        assert sum_of_gradients((torch.ones(2), torch.ones(2).double()), {}) is None
        assert sum_of_gradients((torch.ones(2), 1.0), {}) is None
        assert sum_of_gradients((torch.ones(2).to_sparse(), torch.ones(2).to_sparse()), {}) is None
    assert sum_of_gradients((torch.ones(2), torch.ones(2)), {}) is None  # a forward's sum


class OwnScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient).scatter(0, ROWS[:, None].expand_as(gradient), gradient)


ROWS, COLUMNS = torch.arange(4), torch.arange(96).reshape(4, 24)
SELECTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x.max(-1)[0], "min": lambda x: x.min(0)[0], "sort": lambda x: x.sort()[0],
    "topk": lambda x: x.topk(3)[0], "kthvalue": lambda x: x.kthvalue(2)[0], "median": lambda x: x.median(0)[0],
    "mode": lambda x: x.mode(0)[0], "cummax": lambda x: x.cummax(0)[0], "gather": lambda x: x.gather(1, COLUMNS),
    "take_along_dim": lambda x: torch.take_along_dim(x, COLUMNS, 1), "index": lambda x: x[ROWS],
    "index_select": lambda x: x.index_select(0, ROWS), "take": lambda x: x.take(COLUMNS),
    "masked_select": lambda x: x.masked_select(x > 0.2), "a function of the user": OwnScatter.apply,
    "no selection: index_put": lambda x: (x * 2).index_put((ROWS,), x * 3),
    "no selection: index_add": lambda x: (x * 2).index_add(0, ROWS[:3], x[:3]),
    "no selection: scatter_reduce": lambda x: (x * 2).scatter_reduce(1, COLUMNS, x[:, :24], "amax"),
}  # fmt: skip


@pytest.mark.parametrize("name", SELECTIONS)
def test_the_gradient_of_a_selection_takes_the_memory_that_it_takes_without_a_tracker(name: str) -> None:
    """By the profiler's own events, and to the same bits."""
    taken = []
    for mode in (nullcontext(), nullcontext(), Tracker(torch.nn.Identity(), torch.device("cpu"))):
        total = SELECTIONS[name](x := torch.linspace(-1, 1, 1024).reshape(4, 256).requires_grad_()).square().sum()
        with CpuRecorder() as recorder, mode as tracker:  # type: ignore[attr-defined]
            if tracker is not None:
                tracker.on_phase("backward")
            total.backward()
        taken.append(([size for size in recorder.log.n_bytes if size >= 1024], x.grad))
    _, (plain, expected), (tracked, gradient) = taken  # the first one warms up
    assert tracked == plain and plain and torch.equal(gradient, expected)


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_hook_of_a_selection_may_hold_what_it_copies(name: str) -> None:
    """A hook runs within the node of autograd, and its tensors are the user's: `scatter` copies them."""
    held, ones = torch.zeros(4, 24), torch.ones(4, 24)

    def hook(gradient: torch.Tensor) -> None:
        held.scatter(1, COLUMNS % 24, ones)
        held[:2].scatter_add(1, COLUMNS[:2] % 24, ones)
        held.index_add(0, ROWS, ones)
        held.index_put((ROWS,), ones)
        held.view(-1).put(COLUMNS.view(-1), ones)
        held.masked_scatter(ones > 0, ones)

    with Tracker(torch.nn.Identity(), torch.device("cpu")) as tracker:
        out = SELECTIONS[name](torch.linspace(-1, 1, 1024).reshape(4, 256).requires_grad_())
        out.register_hook(hook)
        tracker.on_phase("backward")
        out.sum().backward()
    assert not held.any()


WIDE = {"width": 64, "length": 64}


def calls_of(policy: Policy | None = None, model: ModelRef | None = None, **options: int) -> tuple[Replay, Allocations]:
    spec = RunSpec(model=model or ref("gpt", **WIDE), policy=policy or Policy(), **options)  # type: ignore[arg-type]
    with preserve_global_state():
        run = record(spec, load(spec.model), lambda what: None)
    assert run.allocations is not None and run.failure is None
    replay = Replay.of(msgspec.structs.replace(measured(), allocations=run.allocations, phases=run.phases), None)
    return replay, run.allocations


@pytest.fixture(scope="module")
def gpt() -> tuple[Replay, Allocations]:
    return calls_of()


def test_a_call_lies_inside_its_parents_and_siblings_follow_each_other(gpt: tuple[Replay, Allocations]) -> None:
    calls = gpt[0].calls
    for fqn, own in calls.items():
        parent = fqn.rpartition(".")[0]
        for call in own:
            assert call.first <= call.end
            if parent in calls:
                assert any(outer.first <= call.first and call.end <= outer.end for outer in calls[parent]), fqn
    blocks = [calls[f"blocks.{i}"][0] for i in range(4)]
    assert all(one.end <= other.first for one, other in zip(blocks, blocks[1:]))


def test_what_comes_out_of_a_block_goes_into_the_next(gpt: tuple[Replay, Allocations]) -> None:
    calls = gpt[0].calls
    for i in range(3):
        (out,) = calls[f"blocks.{i}"][0].outputs
        assert calls[f"blocks.{i + 1}"][0].inputs[0] == out


def test_everything_born_in_a_leaf_belongs_to_it(gpt: tuple[Replay, Allocations]) -> None:
    """Second method: the operators' own tags, which do not know of ticks."""
    replay, log = gpt
    for fqn in ("blocks.0.mlp.0", "blocks.2.norm1", "token"):
        (call,) = replay.calls[fqn]
        inside = [i for i in replay.between(call.first, call.end).tolist() if log.ops[log.op[i]]]
        assert inside and {log.blocks[log.block[i]] for i in inside} == {fqn}


def test_every_microbatch_and_every_use_of_a_shared_block_is_a_call() -> None:
    replay, _ = calls_of(n_accumulation=2)
    assert len(replay.calls["blocks.0"]) == 2
    cell, _ = calls_of(model=ModelRef(target="sample_models/recurrent.py", arguments={
        "length": 5, "width": 16, "expansion": 2, "batch": 4, "vocabulary": 8,
    }))  # fmt: skip
    steps: list[Call] = cell.calls["cell"]
    assert len(steps) == 5
    assert all(one.outputs[0] in other.inputs for one, other in zip(steps, steps[1:]))


def test_running_again_is_no_call() -> None:
    blocks = [f"blocks.{i}" for i in range(4)]
    replay, _ = calls_of(Policy.recompute(blocks))
    assert [len(replay.calls[fqn]) for fqn in (*blocks, "blocks.0.qkv", "blocks.3.mlp.2")] == [1] * 6
