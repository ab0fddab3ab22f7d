"""Running blocks of each thread, borders of backward, saved tensors, and a recompute that differs in words."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

import explorer
from explorer.engine.bench.measure import measure
from explorer.engine.policy.apply import apply_policy
from explorer.engine.watch.checkpoint_error import BRANCH, CACHE, TOKENS, TYPES, in_words
from explorer.engine.watch.scopes import BlockScopes, Frame, Listener, ModuleHook, around_backward, looking_at_saved
from explorer.record import ModelRef, Policy, RunSpec, Unit


class Log(Listener):
    """Events in words."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.events: list[str] = []
        self.scopes = BlockScopes(model, self, **options)

    def entered(self, block: int, frame: Frame, inputs: Any) -> None:
        self.events.append(f"{'again' if frame.reruns else 'into'} {self.scopes.fqns[block]}")

    def left(self, block: int, frame: Frame, output: Any) -> None:
        self.events.append(f"out of {self.scopes.fqns[block]}")

    def rerun_changed(self, frame: Frame) -> None:
        self.events.append("segment begins" if frame.reruns else "segment ends")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Tanh())


def events_of_backward(policy: Policy, *, segments: tuple[str, ...] = ()) -> list[str]:
    model = net()
    log = Log(model, segments=segments)
    with apply_policy(model, policy), log.scopes:
        loss = model(torch.ones(1, 2)).sum()
        log.events.clear()
        loss.backward()
    assert log.scopes.frame.stack == [0] and not log.scopes.frame.reruns
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    return log.events


def test_blocks_of_a_forward_are_nested() -> None:
    model = net()
    log = Log(model)
    with log.scopes:
        model(torch.ones(1, 2))
    inside = ["into 0", "into 0.0", "out of 0.0", "into 0.1", "out of 0.1", "out of 0", "into 1", "out of 1"]
    assert log.events == ["into ", *inside, "out of "]


def test_a_block_that_runs_again_is_entered_though_its_own_hooks_are_silent() -> None:
    assert events_of_backward(Policy()) == []
    again = ["again 0", "again 0.0", "out of 0.0", "again 0.1", "out of 0.1", "out of 0"]
    assert events_of_backward(Policy.recompute(["0"], early_stop=False)) == again


def test_a_segment_runs_again_by_its_blocks() -> None:
    policy = Policy(units=(Unit(blocks=("0", "1")),), early_stop=False)
    events = events_of_backward(policy, segments=("0",))
    assert events[0] == "segment begins" and events[-1] == "segment ends"
    assert events.count("again 0") == events.count("again 1") == 1


def test_an_exception_leaves_all_blocks() -> None:
    model = net()
    log = Log(model)
    with pytest.raises(RuntimeError), log.scopes:
        model(torch.ones(1, 3))
    assert log.scopes.frame.stack == [0] and log.events[-3:] == ["out of 0.0", "out of 0", "out of "]


def test_each_thread_has_a_frame_and_two_names_are_one_block() -> None:
    model = net()
    model.again = model[1]
    scopes = BlockScopes(model, Listener())
    frames = [scopes.frame]
    thread = threading.Thread(target=lambda: frames.append(scopes.frame))
    thread.start()
    thread.join()
    assert frames[0] is not frames[1] and scopes.frame is frames[0]
    assert scopes.index["again"] == scopes.index["1"] and "again" not in scopes.fqns


def test_copies_of_a_hook_report_nothing() -> None:
    calls: list[str] = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(ModuleHook(lambda name, *rest: calls.append(name), "before"), with_kwargs=True)
    model.register_forward_hook(ModuleHook(lambda name, *rest: calls.append(name), "after"), always_call=True)
    model(torch.ones(1, 2))
    assert calls == ["before", "after"]
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(torch.ones(1, 2)), model.forward(torch.ones(1, 2)))
    assert calls == ["before", "after"]


def twice(x: Tensor) -> None:
    (x * 2).sum().backward()
    torch.autograd.backward([(x * 3).sum()])


def nested(x: Tensor) -> None:
    checkpoint(torch.tanh, x, use_reentrant=True).sum().backward()


def failing(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        x.detach().sum().backward()


def penalized(x: Tensor) -> None:
    (slope,) = grad((x * x).sum(), x, create_graph=True)
    torch.autograd.functional.vjp(torch.tanh, x, torch.ones(2))
    slope.sum().backward()


@pytest.mark.parametrize(
    ("step", "n_backwards", "n_gradients"), [(twice, 2, 0), (nested, 1, 0), (failing, 1, 0), (penalized, 1, 2)]
)
def test_each_outer_backward_has_two_borders(
    step: Callable[[Tensor], None], n_backwards: int, n_gradients: int
) -> None:
    plain = torch.autograd.backward, torch.autograd._engine_run_backward
    borders: list[str] = []
    begins, ended = (partial(borders.append, word) for word in ("begins", "ended"))
    for in_forward, n_heard in ((None, 0), (lambda: True, 0), (lambda: False, n_gradients)):
        borders.clear()
        with around_backward(begins, ended, in_forward=in_forward):
            step(torch.ones(2, requires_grad=True))
        twice(torch.ones(2, requires_grad=True))
        assert borders == ["begins", "ended"] * (n_backwards + n_heard)
    assert plain == (torch.autograd.backward, torch.autograd._engine_run_backward)


@pytest.fixture
def without_the_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_the_collector")
@pytest.mark.parametrize("operation", [torch.exp, torch.tanh, torch.sigmoid, torch.relu, lambda x: x.softmax(-1)])
def test_an_output_that_its_own_operation_saves_dies_with_its_last_name(operation: Callable[[Tensor], Tensor]) -> None:
    x, saved = torch.ones(3, requires_grad=True), []
    with looking_at_saved(lambda tensor: saved.append(tensor.shape)):
        made = operation(x)
    assert saved
    gone = weakref.ref(made)
    del made
    assert gone() is None


def test_gradients_are_those_without_a_look() -> None:
    x = torch.randn(3, requires_grad=True)
    with looking_at_saved(lambda tensor: None):
        watched = (x.exp() * x).softmax(-1).square().sum()
    plain = (x.exp() * x).softmax(-1).square().sum()
    assert torch.equal(*(torch.autograd.grad(loss, x)[0] for loss in (watched, plain)))


def test_no_mode_sees_the_look() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Names() as names, looking_at_saved(lambda tensor: None):
        (x.exp() * x).sum()
    assert names.seen == ["aten.exp.default", "aten.mul.Tensor", "aten.sum.default"]


class Block(nn.Module):
    """Does something else each time, as `change` says."""

    def __init__(self, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.change, self.n_calls = change, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        return self.down(torch.tanh(self.change(self.n_calls, self.up(x)))).sum(dim=(0, 1), keepdim=True)


class Net(nn.Module):
    def __init__(self, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Block(change)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)  # type: ignore[no-any-return]


CHANGES = {
    "cache": (lambda n, x: torch.cat([x] * n, dim=1), "(2, 4, 16)", "(2, 8, 16)", CACHE),
    "tokens": (lambda n, x: x[: 3 - n], "(2, 4, 16)", "(1, 4, 16)", TOKENS),
}


def failed(change: Callable[[int, torch.Tensor], torch.Tensor]) -> tuple[CheckpointError, nn.Module]:
    model = Net(change)
    loss = model(torch.randn(2, 4, 8)).sum()
    with pytest.raises(CheckpointError) as caught:
        loss.backward()
    return caught.value, model


@pytest.mark.parametrize("name", ["cache", "tokens"])
def test_block_operator_both_shapes_and_the_usual_cause_are_named(name: str) -> None:
    change, forward, again, cause = CHANGES[name]
    sentence = in_words(*failed(change))
    assert sentence.startswith("The recompute of blocks.1 made another tensor than forward: ")
    assert "aten." in sentence and "returned it in blocks.1" in sentence
    assert f"was {forward} float32 in forward and {again} float32 in the recompute" in sentence and cause in sentence


class Parts(nn.Module):
    """Saves one third of a projection, made by `make`, and something of another shape when it runs again."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.qkv, self.make, self.n_calls = nn.Linear(8, 24), make, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        part = self.qkv(x)
        return (part.sin() if self.n_calls == 1 else self.make(part).cos()).sum(dim=(0, 1), keepdim=True)


MADE_BY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten.transpose.int": lambda x: x.transpose(0, 1),
    "aten.slice.Tensor": lambda x: x[:, :2],
    "aten.split.Tensor": lambda x: x.chunk(3, -1)[1],
    "aten.view.default": lambda x: x.unflatten(-1, (3, 8)),
    "aten.relu_.default": lambda x: x[:, :2].relu_(),
    "aten.cat.default": lambda x: torch.cat([x, x]),
    "aten.mul.Tensor": lambda x: (x * 2)[:].narrow(0, 0, 2)[:1].expand(3, -1, -1) * 2,
}


@pytest.mark.parametrize("operator", MADE_BY)
def test_the_operator_that_is_named_made_the_very_tensor_and_not_its_storage_alone(operator: str) -> None:
    model = nn.ModuleList([Parts(MADE_BY[operator])])
    loss = checkpoint(model[0], torch.randn(2, 4, 8, requires_grad=True), use_reentrant=False).sum()
    with pytest.raises(CheckpointError) as caught:
        loss.backward()
    assert f"where {operator} returned it in 0" in in_words(caught.value, model)


def test_another_number_format_is_told_from_another_shape() -> None:
    sentence = in_words(*failed_by_a_cast())
    assert TYPES in sentence and "float32" in sentence and "bfloat16" in sentence


def failed_by_a_cast() -> tuple[CheckpointError, nn.Module]:
    def cast(n: int, x: torch.Tensor) -> torch.Tensor:
        return x if n == 1 else x.bfloat16()

    class Tanh(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n_calls += 1
            return torch.tanh(self.change(self.n_calls, self.up(x))).float().sum(dim=(0, 1), keepdim=True)

    model = Net(cast)
    model.blocks[1] = Tanh(cast)
    loss = model(torch.randn(2, 4, 8)).sum()
    with pytest.raises(CheckpointError) as caught:
        loss.backward()
    return caught.value, model


def test_another_number_of_tensors_is_a_branch() -> None:
    sentence = in_words(*failed(lambda n, x: x.exp().sin() if n == 1 else x))
    assert "forward saved" in sentence and BRANCH in sentence and "blocks.1" in sentence


def test_it_stands_in_a_recorded_step_and_on_the_error_itself() -> None:
    model = Net(CHANGES["cache"][0])
    with pytest.raises(CheckpointError) as caught, explorer.record_step(model) as run:
        model(torch.randn(2, 4, 8)).sum().backward()
    assert run.measurement.failure is not None and CACHE in run.measurement.failure.sentence
    assert caught.value.__notes__ == [run.measurement.failure.sentence]


def test_other_errors_are_left_alone() -> None:
    assert in_words(RuntimeError("tensor at position 3"), nn.Linear(1, 1)) == ""


def test_it_stands_in_a_measured_run(tmp_path: Path) -> None:
    (tmp_path / "grows.py").write_text(GROWS)
    run = measure(RunSpec(model=ModelRef(target=f"{tmp_path}/grows.py"), policy=Policy.recompute(["1"]), n_repeats=0))
    assert run.failure is not None and CACHE in run.failure.sentence and "returned it in 1" in run.failure.sentence


GROWS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.kept = []

    def forward(self, x):
        self.kept.append(self.up(x).detach())
        return (torch.cat(self.kept, 1).tanh() * x.sum()).sum(1, keepdim=True)

def build():
    return nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1)), torch.randn(2, 4, 8)
"""
