"""Faults of a policy are listed at once, before a change. A model's own checkpointing is switched off for a while."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn

from explorer.engine.policy.apply import SWITCHES, apply_policy, checkpointing_off
from explorer.engine.policy.units import runs_its_children
from explorer.errors import BadInput, InvalidPolicy
from explorer.record.policy import Policy, Unit
from tests.engine.policy.nets import net

BAD = [
    (Policy.recompute(["block.0"]), "no block 'block.0' (did you mean"),
    (Policy.recompute(["blocks"]), "ModuleList, which is never called"),
    (Policy.recompute(["blocks.0", "blocks.0"]), "named 2 times"),
    (Policy.recompute([("chain.0", "chain.1"), ("chain.1", "chain.2")]), "'chain.1' is named 2 times"),
    (Policy.recompute([("chain.0", "chain.2")]), "do not follow each other"),
    (Policy.recompute([("chain.1", "chain.0")]), "do not follow each other"),
    (Policy.recompute([("blocks.0", "blocks.2")]), "do not follow each other"),
    (Policy.recompute([("stem", "chain.0")]), "different parents"),
    (Policy(units=(Unit(blocks=()),)), "names no block"),
    (Policy(units=(Unit(blocks=("stem",), action="save_ops"),)), "names no operator"),
    (Policy(units=(Unit(blocks=("stem",), action="save_ops", save_ops=("aten.mm",)),)), "no operator 'aten.mm'"),
    (Policy(units=(Unit(blocks=("stem",), save_ops=("aten.mm.default",)),)), "its action is recompute"),
    (Policy(units=(Unit(blocks=("stem",), action="nothing"),)), "the action 'nothing'"),
    (Policy.recompute(["stem"], restore_rng=("stem.generator",)), "restore_rng names 'stem.generator'"),
    (Policy.recompute(["stem"], running_stats="twice"), "running_stats is 'twice'"),
    (
        Policy(units=(Unit(blocks=("stem",), action="save_ops", save_ops=("aten.mm.default",)),), use_reentrant=True),
        "use_reentrant=True cannot save",
    ),
]


@pytest.mark.parametrize(("policy", "words"), BAD, ids=[words for _, words in BAD])
def test_a_faulty_policy_says_what_is_wrong_and_changes_nothing(policy: Policy, words: str) -> None:
    model = net()
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(InvalidPolicy) as caught:
        apply_policy(model, policy)
    assert words in caught.value.sentence
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before


def test_what_is_no_model_and_what_is_no_policy_are_refused_in_one_sentence() -> None:
    with pytest.raises(BadInput, match="A model was expected and int was given"):
        apply_policy(3, Policy())
    with pytest.raises(BadInput, match="A Policy was expected and str was given"):
        apply_policy(net(), "policy.yaml")


def test_a_list_of_generators_is_as_good_as_a_tuple() -> None:
    apply_policy(net(), Policy.recompute(["stem"], restore_rng=["python"])).undo()


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(InvalidPolicy, match="4 faults.*'stm'.*'chain.9'.*running_stats.*'blocks'"):
        apply_policy(net(), Policy.recompute(["stm", "chain.9", "blocks"], running_stats="twice"))


def test_only_torchs_own_sequential_runs_its_children() -> None:
    class Skips(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)

    assert runs_its_children(nn.Sequential()) and not runs_its_children(Skips())
    assert not runs_its_children(nn.ModuleList())


class ChecksItself(nn.Module):
    """Checkpoints its layer itself, by torch's function, either way."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant, self.n_calls = nn.Linear(3, 3), reentrant, 0

    def run(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return self.layer(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return torchs.checkpoint(self.run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_is_a_plain_call_with_the_same_gradients(reentrant: bool) -> None:
    model, x = ChecksItself(reentrant), torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert model.n_calls == 2
    expected = model.layer.weight.grad.clone()
    model.zero_grad()
    with checkpointing_off(model):
        model(x).sum().backward()
    assert model.n_calls == 3 and torch.equal(model.layer.weight.grad, expected)
    model(x).sum().backward()
    assert model.n_calls == 5


def test_switches_that_are_on_are_off_inside_alone() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for switch in SWITCHES:
        setattr(model[0], switch, True)
        setattr(model[1], switch, 3)  # a number of that name is none

    def switches() -> list[set[object]]:
        return [{getattr(layer, switch) for switch in SWITCHES} for layer in model]

    with pytest.raises(ValueError), checkpointing_off(model):
        assert switches() == [{False}, {3}]
        raise ValueError
    assert switches() == [{True}, {3}]
