"""LoRA adapters and the parts of a model that levers freeze: layers, gradients, and the lines for a script."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn

from explorer.engine.model.adapters import add_adapters, parts_of
from explorer.engine.model.conditions import freeze
from explorer.engine.policy.apply import apply_policy
from explorer.errors import BadInput
from explorer.plan import lever_text
from explorer.record.fit import LeverRow, PlayedStep
from explorer.record.graph import Lora, ModelRef
from explorer.record.policy import Policy, Unit
from explorer.record.run import RunSpec


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(8))
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.token)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x + self.attention(x, x, x)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_an_adapter_is_the_product_of_two_thin_matrices_and_the_layer_is_frozen() -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), torch.randn(5, 6)
    plain = copy.deepcopy(layer)
    add_adapters(layer, Lora(targets="0", rank=2))
    assert torch.equal(layer(x), plain(x)), "the second matrix begins at zero"
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"0.lora_a", "0.lora_b"}
    with torch.no_grad():
        layer[0].lora_b.normal_()
        plain[0].weight += layer[0].lora_b @ layer[0].lora_a * (8 / 2)
    torch.testing.assert_close(layer(x), plain(x))
    layer(x).sum().backward()
    assert layer[0].weight.grad is None and layer[0].lora_a.grad is not None
    add_adapters(layer, Lora(targets="0", rank=2))
    assert sum(p.numel() for p in layer.parameters() if p.requires_grad) == 2 * (6 + 4), "a second time adds nothing"


def test_a_transposed_linear_of_transformers_is_adapted() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model, x = nn.Sequential(conv1d(4, 6), nn.Linear(4, 2)), torch.randn(5, 6)
    assert parts_of(model, has_attention=False).linears == "0"
    add_adapters(model, Lora(targets="0", rank=2))
    model(x).sum().backward()
    assert model[0].lora_a.shape == (2, 6) and model[0].lora_b.grad.shape == (4, 2)


def test_parts_are_all_but_the_last_layer() -> None:
    parts = parts_of(Net(), has_attention=False)
    assert parts.all_but_last == ("body",)
    names = [name for name, _ in Net().named_modules() if re.fullmatch(parts.linears, name)]
    assert names == [f"body.layers.{n}" for n in range(12)], "attention computes without the forward of its Linear"
    assert set(parts_of(Body(), has_attention=False).all_but_last) == {
        "token", "norm", "layers", "attention.in_proj_weight", "attention.in_proj_bias",
    }  # fmt: skip
    alone = parts_of(nn.Linear(2, 2), has_attention=False)
    assert (alone.all_but_last, alone.linears) == ((), "")
    chain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
    linears = parts_of(chain, has_attention=False).linears
    assert [n for n in range(11) if re.fullmatch(linears, str(n))] == list(range(10)), "the last is in the same list"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList([nn.Embedding(4, 8), nn.Embedding(9, 8)])
        self.body = Body()
        self.head = nn.Linear(8, 4)
        self.head.weight = self.words[0].weight


def test_a_weight_that_the_last_layer_shares_stays_trained() -> None:
    assert parts_of(Tied(), has_attention=False).all_but_last == ("words.1", "body")


@pytest.mark.parametrize("kind", [Net, Body, Tied])
def test_the_line_for_a_script_freezes_what_the_lever_freezes(kind: type[nn.Module]) -> None:
    model, by_line = kind(), kind()
    spec = RunSpec(model=ModelRef(target="nets.py"), frozen=parts_of(model, has_attention=False).all_but_last)
    freeze(model, spec.frozen)
    (line,) = lever_text.script_lines(LeverRow(levers=("freeze",), step=PlayedStep(spec=spec, step_peak_bytes=1)))
    exec(line, {"model": by_line})
    trained = [{name for name, p in each.named_parameters() if p.requires_grad} for each in (model, by_line)]
    assert trained[0] == trained[1] and len(trained[0]) == 2


def test_the_line_for_a_script_names_the_layers_that_are_adapted() -> None:
    lora = Lora(targets=parts_of(Net(), has_attention=False).linears)
    spec = RunSpec(model=ModelRef(target="nets.py"), lora=lora)
    (line,) = lever_text.script_lines(LeverRow(levers=("lora",), step=PlayedStep(spec=spec, step_peak_bytes=1)))
    assert 'peft.LoraConfig(r=8, target_modules=r"body\\.layers\\.\\d+")' in line


def test_adapters_without_a_layer_are_refused() -> None:
    with pytest.raises(BadInput, match="matches none of this model"):
        add_adapters(Net(), Lora(targets="query"))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_adapters_of_a_recomputed_first_block_train_unless_it_is_reentrant(*, use_reentrant: bool) -> None:
    """The classic trap: the inputs need no gradient, so a reentrant checkpoint cuts the block off."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    add_adapters(model, Lora(targets="0|2"))
    policy = Policy(units=(Unit(blocks=("0",)),), use_reentrant=use_reentrant)
    with apply_policy(model, policy), warnings.catch_warnings(action="ignore"):
        model(torch.randn(4, 8)).square().sum().backward()
    assert (model[0].lora_b.grad is None) is use_reentrant and model[2].lora_b.grad is not None
