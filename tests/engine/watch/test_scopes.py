"""Running blocks of each thread, borders of backward, and saved tensors, as the instruments' hooks report them."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from explorer.engine.policy.apply import apply_policy
from explorer.engine.watch.scopes import BlockScopes, Frame, Listener, ModuleHook, around_backward, looking_at_saved
from explorer.record import Policy, Unit


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


@pytest.mark.parametrize(("step", "n_backwards"), [(twice, 2), (nested, 1), (failing, 1)])
def test_each_outer_backward_has_two_borders(step: Callable[[Tensor], None], n_backwards: int) -> None:
    plain = torch.autograd.backward
    borders: list[str] = []
    with around_backward(lambda: borders.append("begins"), lambda: borders.append("ended")):
        step(torch.ones(2, requires_grad=True))
    twice(torch.ones(2, requires_grad=True))
    assert borders == ["begins", "ended"] * n_backwards and torch.autograd.backward is plain


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
