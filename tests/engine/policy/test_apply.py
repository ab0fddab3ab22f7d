"""A policy in force changes what is held and nothing else; taken off, it leaves no trace."""

from __future__ import annotations

import copy
import io
import pickle
import random
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import _infer_device_type

import explorer
from explorer.engine.policy.apply import apply_policy
from explorer.engine.policy.units import witnesses, wraps_on
from explorer.engine.state.rng import seed_everything
from explorer.errors import InvalidPolicy
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.block_names import shape_of
from explorer.record.files import PolicyFile
from explorer.record.policy import Policy, Unit
from tests.engine.policy import test_segments
from tests.engine.policy.nets import assert_same, bits, net, reruns, second_order
from tests.engine.policy.test_segments import N_BLOCKS, TWO, made

UNITS = (
    ("stem",),
    ("blocks.0",),
    ("blocks.1",),
    ("blocks.2.up",),
    ("chain.0", "chain.1"),
    ("chain.2", "chain.3"),
    ("chain",),
    ("",),
)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # reentrant below reentrant runs without gradients first
@settings(max_examples=15, deadline=None)
@given(chosen=st.sets(st.sampled_from(UNITS)), reentrant=st.booleans(), early_stop=st.booleans())
def test_any_policy_gives_the_bare_step_bit_by_bit(
    chosen: set[tuple[str, ...]], reentrant: bool, early_stop: bool
) -> None:
    if reentrant:  # the first block of a reentrant unit trains nothing when its input needs no gradient
        chosen -= {("stem",), ("",)}
    bare = bits(net())
    model = net()
    policy = Policy.recompute(chosen, use_reentrant=reentrant, early_stop=early_stop)
    with apply_policy(model, policy):
        assert_same(bare, bits(model))
        again = net()
        bits(again)
        assert_same(bits(again, seed=2), bits(model, seed=2))  # running statistics add up


def test_every_unit_runs_again_exactly_once_and_nothing_else_does() -> None:
    model = net()
    units = [("blocks.0",), ("blocks.2",), ("chain.1", "chain.2", "chain.3")]
    with apply_policy(model, Policy.recompute(units)):
        assert sorted(reruns(model)) == ["blocks.0", "blocks.2", "chain.1"]
    assert reruns(model) == []


def test_nothing_is_recomputed_without_gradients_and_everything_in_eval_mode() -> None:
    model = net().eval()
    with apply_policy(model, Policy.recompute(["blocks.0"])), torch.no_grad():
        model(torch.randn(6, 8))
    with apply_policy(model, Policy.recompute(["blocks.0"])):
        assert reruns(model) == ["blocks.0"]


def listed() -> nn.Module:
    return made(test_segments.Net)


@pytest.mark.parametrize(("make", "units", "wrapped"), [
    (
        net,
        ["", "blocks.0", "blocks.1", "chain", ("chain.0", "chain.1"), ("chain.3", "chain.4")],
        ["", "blocks.0", "blocks.1", "chain"],
    ),
    (listed, [*TWO, "blocks.0.up"], ["blocks.0", "blocks.0.up", *(f"blocks.{i}" for i in range(1, N_BLOCKS))]),
])  # fmt: skip
def test_a_policy_changes_nothing_visible_and_undo_leaves_no_trace(
    make: Callable[[], Any], units: list[Any], wrapped: list[str]
) -> None:
    model = make()
    model.blocks[1].forward = model.blocks[1].forward  # a user's patch on the instance

    def appearance() -> tuple[object, ...]:
        walks = (model.named_modules, model.named_parameters, model.named_buffers)
        names = [[name for name, _ in walk()] for walk in walks]
        return names, list(model.state_dict()), [type(m) for m in model.modules()], repr(model)

    before, before_by_eye = {name: dict(vars(m)) for name, m in model.named_modules()}, appearance()
    handle = apply_policy(model, Policy.recompute(units))
    assert appearance() == before_by_eye
    assert [name for name, m in model.named_modules() if wraps_on(m)] == wrapped
    handle.undo()
    handle.undo()
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize(("make", "units", "ran"), [
    (net, ["", "blocks.0", ("chain.0", "chain.1")], ["", "blocks.0", "chain.0"]),
    (listed, TWO, ["blocks.0", "blocks.2"]),
])  # fmt: skip
def test_a_copy_keeps_the_policy_and_runs_its_own_weights(
    make: Callable[[], Any], units: list[Any], ran: list[str], copied: Callable[[nn.Module], nn.Module]
) -> None:
    model = make()
    apply_policy(model, Policy.recompute(units))
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert_same(bits(make()), bits(twin))
    assert sorted(reruns(twin)) == ran
    assert all(p.isnan().all() for p in model.parameters())


def test_a_module_that_is_a_child_twice_runs_twice_inside_and_outside_a_segment() -> None:
    def shared() -> nn.Module:
        seed_everything(0)
        same = nn.Linear(8, 8)
        return nn.Sequential(same, nn.Tanh(), same, same, nn.Tanh())

    bare = bits(shared())
    for units in ([("0", "1")], [("2", "3")], [("1", "2", "3")], ["0"]):
        model = shared()
        with apply_policy(model, Policy.recompute(units)):
            assert_same(bare, bits(model))


def test_hooks_fire_on_the_block_once_and_below_it_twice() -> None:
    model = net()
    fired: list[str] = []
    for name in ("blocks.0", "blocks.0.up", "chain.2"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: fired.append(name))
    with apply_policy(model, Policy.recompute(["blocks.0", ("chain.2", "chain.3")])):
        bits(model)
    assert sorted(fired) == ["blocks.0", "blocks.0.up", "blocks.0.up", "chain.2", "chain.2"]


class Noise(nn.Module):
    """Multiplies by numbers that torch does not look for. Those of Python and numpy are traps of hazards."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.source = source
        self.own = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.source in ("python", "numpy"):
            return x * (random.random() if self.source == "python" else float(np.random.rand()))
        return x * torch.rand(x.shape, generator=self.own if self.source == "own" else GLOBAL)


GLOBAL = torch.Generator()


def noisy(source: str) -> nn.Module:
    GLOBAL.manual_seed(9)
    seed_everything(0)
    return nn.Sequential(nn.Linear(8, 8), Noise(source), nn.Linear(8, 8), Noise(source))


@pytest.mark.parametrize(
    ("source", "names", "generators"), [("own", ("1.own", "3.own"), ()), ("global", (), (GLOBAL,))]
)
def test_generators_torch_does_not_stash_are_restored_when_named(
    source: str, names: tuple[str, ...], generators: tuple[torch.Generator, ...]
) -> None:
    bare = bits(noisy(source))
    forgotten = noisy(source)
    with apply_policy(forgotten, Policy.recompute(["1", "3"])), pytest.raises(AssertionError):
        assert_same(bare, bits(forgotten))
    model = noisy(source)
    apply_policy(model, Policy.recompute(["1", "3"], restore_rng=names), generators=generators)
    assert_same(bare, bits(model))
    twin = copy.deepcopy(noisy(source))
    apply_policy(twin, Policy.recompute([("1", "2", "3")], restore_rng=names), generators=generators)
    assert_same(bare, bits(copy.deepcopy(twin)))


def three_steps(model: nn.Module) -> list[Tensor]:
    """The loss and all gradients of each of three steps: later steps draw what the step before left."""
    inputs, left = torch.randn(2, 8, generator=torch.Generator().manual_seed(5)), list[Tensor]()
    for _ in range(3):
        model.zero_grad()
        loss = model(inputs).pow(2).sum()
        loss.backward()
        left += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    return left


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("source", ["shared", "global", "python", "numpy"])
def test_a_generator_of_several_units_goes_on_where_the_last_forward_left_it(source: str, reentrant: bool) -> None:
    """Each rerun sets the generator back and has to return it: else the next step draws numbers of an earlier unit."""

    def make() -> nn.Module:
        model = noisy("own" if source == "shared" else source)
        random.seed(3)
        np.random.seed(3)
        model[3].own = model[1].own
        return model

    names = {"shared": ("1.own", "3.own"), "global": ()}.get(source, (source,))
    options = {"restore_rng": names, "use_reentrant": reentrant}
    bare, model = three_steps(make()), make()
    apply_policy(model, Policy.recompute(["1", "3"], **options), generators=(GLOBAL,) if source == "global" else ())
    assert all(torch.equal(*pair) for pair in zip(bare, three_steps(model), strict=True))


def test_saved_operators_and_offload_keep_results_and_running_statistics() -> None:
    saving = Unit(blocks=("blocks.0",), action="save_ops", save_ops=("aten.addmm.default",))
    whole = Unit(blocks=("chain.0", "chain.1"), action="save_ops", save_ops=("aten.tanh.default",))
    for units, n_reruns in (((saving, whole), 2), ((Unit(blocks=("blocks.0",), action="offload"),), 0)):
        model = net()
        with apply_policy(model, Policy(units=units)):
            assert_same(bits(net()), bits(model))
            assert len(reruns(model)) == n_reruns


@pytest.mark.parametrize(("make", "units"), [(net, ["blocks.0", "blocks.1", ("chain.0", "chain.1")]), (listed, TWO)])
def test_second_order_is_exact(make: Callable[[], Any], units: list[Any]) -> None:
    bare, model = make(), make()
    with apply_policy(model, Policy.recompute(units)):
        pairs = list(zip(second_order(bare), second_order(model), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.equal(a, b) for a, b in zip(bare.buffers(), model.buffers(), strict=True))


def test_another_policy_is_refused_and_the_same_one_changes_nothing() -> None:
    model = net()
    bare, before = bits(net()), {name: dict(vars(m)) for name, m in model.named_modules()}
    policy = Policy.recompute(["stem", ("chain.0", "chain.1"), "chain.3"], restore_rng=("python",))
    handle = apply_policy(model, policy)
    for other in (Policy.recompute(["blocks.0"]), Policy.recompute(["stem"]), Policy(units=policy.units)):
        with pytest.raises(InvalidPolicy, match="already carries one"):
            apply_policy(model, other)
    applied = {name: dict(vars(m)) for name, m in model.named_modules()}
    apply_policy(model, policy).undo()
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == applied
    assert reruns(model) == ["chain.3", "chain.0", "stem"]
    assert_same(bare, bits(net()))
    twin = copy.deepcopy(model)
    apply_policy(twin, policy)
    handle.undo()
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    apply_policy(model, Policy.recompute(["blocks.0"])).undo()


def test_generators_are_part_of_what_makes_a_policy_the_same() -> None:
    model, generator = net(), torch.Generator()
    apply_policy(model, Policy.recompute(["stem"]), generators=(generator,))
    apply_policy(model, Policy.recompute(["stem"]), generators=(generator,))
    with pytest.raises(InvalidPolicy, match="already carries one"):
        apply_policy(model, Policy.recompute(["stem"]))


class ByName(nn.Module):
    """A block whose tensors come by keyword alone, one of them inside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, *, x: Tensor, more: dict[str, Tensor]) -> Tensor:
        return self.dropout(torch.tanh(self.up(x) * more["scale"]))


class CallsByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(8, 8), ByName()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.block(x=h, more={"scale": h.sigmoid()})


@pytest.mark.parametrize("witnessed", [False, True])
def test_tensors_given_by_keyword_get_their_exact_gradients(witnessed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the witnesses that a GPU would add to the call: `stem` learns through the keywords alone."""
    if witnessed:
        monkeypatch.setattr("explorer.engine.policy.units.witnesses", lambda *_: (torch.ones(1),))
    seed_everything(0)
    bare, model = CallsByName(), CallsByName()
    model.load_state_dict(bare.state_dict())
    with apply_policy(model, Policy.recompute(["block"])):
        assert_same(bits(bare), bits(model))
        assert reruns(model) == ["block"]


class Keywords(nn.Module):
    """A block that is handed one tensor by position and two by keyword, and one that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(8, 8), Mixes()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.block(h, gate=h.sigmoid(), shift=h * 2, power=2)


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor, *, shift: Tensor, gate: Tensor, power: int) -> Tensor:
        return self.dropout(torch.tanh(self.up(x) * gate + shift)) ** power


def test_reentrant_checkpointing_takes_keywords_by_position() -> None:
    seed_everything(0)
    bare, model = Keywords(), Keywords()
    model.load_state_dict(bare.state_dict())
    apply_policy(model, Policy.recompute(["block"], use_reentrant=True))
    assert reruns(model) == ["block"]
    assert_same(bits(bare), bits(model))


def test_a_unit_inside_another_holds_no_tensor_that_it_is_given_by_keyword() -> None:
    """torch's own checkpoint holds such a tensor from forward on, though the unit around it can make it again."""
    seed_everything(0)
    bare, model = nn.Sequential(Keywords(), nn.Linear(8, 8)), nn.Sequential(Keywords(), nn.Linear(8, 8))
    model.load_state_dict(bare.state_dict())
    apply_policy(model, Policy.recompute(["0", "0.block"]))
    inputs: list[weakref.ref[torch.UntypedStorage]] = []

    def noted(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        inputs.extend(weakref.ref(kwargs[name].untyped_storage()) for name in ("gate", "shift"))

    with model[0].block.register_forward_pre_hook(noted, with_kwargs=True):
        output = model(torch.randn(4, 8))
    assert len(inputs) == 2 and not any(storage() for storage in inputs) and output.requires_grad
    assert_same(bits(bare), bits(model))


def test_torch_sees_every_device_of_a_unit() -> None:
    """Fake tensors stand in for GPUs: what witnesses name is what torch's own search then finds."""
    with FakeTensorMode():
        here, first, second = (torch.empty(2, device=device) for device in ("cpu", "cuda:0", "cuda:1"))
        block = nn.Module()
        block.weight = nn.Parameter(second)
    assert witnesses((here,), ()) == witnesses((first,), ()) == ()
    assert [w.device for w in witnesses((here, [first]), (block,))] == [second.device]
    assert witnesses((first, second), (block,)) == ()
    assert _infer_device_type(here, witnesses((here,), (block,))) == "cuda"


def test_a_stage_takes_its_part_of_a_policy() -> None:
    """A split model: each part keeps the names of the whole and lacks the blocks of the others."""
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    policy = Policy.recompute(["0", "2"])
    part = copy.deepcopy(whole)
    del part[0]
    stage = nn.ModuleDict({"1": part[0], "2": part[1]})
    with pytest.raises(InvalidPolicy, match="no block '0'"):
        apply_policy(stage, policy)
    handle = apply_policy(stage, policy, part=True)
    assert [bool(wraps_on(module)) for module in stage.values()] == [False, True]
    handle.undo()
    assert not wraps_on(stage["2"])


def test_a_model_that_changed_since_the_file_was_written_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    names = shape_of(fqn for fqn, _ in net().named_modules())
    path.write_text(policy_file.dumps(PolicyFile(policy=Policy.recompute(["blocks.0"]), blocks=names)))
    policy = explorer.load_policy(path)
    assert policy == Policy.recompute(["blocks.0"])
    with apply_policy(net(), policy):  # a warning would fail this test
        pass
    deeper = net()
    deeper.blocks.append(nn.Identity())
    deeper.extra = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"applied by name: blocks\.\* are \d+, and were \d+; new: extra"):
        handle = apply_policy(deeper, policy)
    assert handle.policy.blocks == ("blocks.0",)
