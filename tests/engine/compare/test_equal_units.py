"""Which units the probe repeats twice only: equal ones that can remember nothing. Any doubt, and all run in full."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.compare import unit_calls
from explorer.engine.compare.equal_units import signature
from explorer.engine.compare.probe import ProbedStep, probed_step
from explorer.record.graph import ModelRef
from explorer.record.plan import silent
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from sample_models import gpt
from tests.engine import plain_nets
from tests.engine.plain_nets import Pure, made

X = (torch.ones(2, 4),)


def test_equal_blocks_have_one_signature_and_any_other_structure_has_another() -> None:
    assert signature([Pure()], X) == signature([Pure()], X) is not None
    frozen, late = Pure().requires_grad_(False), Pure()
    late.norm.bias.requires_grad_(False)
    others = [Pure(share=0.2), Pure().double(), Pure().eval(), frozen, late, made("def late(self, x): return x")]
    inputs = [(torch.ones(3, 4),), (torch.ones(2, 4).double(),), (torch.ones(2, 4).requires_grad_(),), (*X, None)]
    found = {signature([Pure()], X), signature([Pure(), Pure()], X)}
    found |= {signature([block], X) for block in others} | {signature([Pure()], of) for of in inputs}
    assert len(found) == 2 + len(others) + len(inputs) and None not in found


def test_all_blocks_of_the_sample_gpt_are_equal() -> None:
    sizes: Any = gpt.SIZES["small"]
    blocks: Any = gpt.build(**sizes)[0].blocks
    (found,) = {signature([block], (torch.ones(1, 8, 128),)) for block in blocks}
    assert found is not None


@pytest.mark.parametrize("body", plain_nets.REMEMBER)
def test_code_that_could_remember_a_call_has_no_signature(body: str) -> None:
    assert signature([made(body)], X) is None
    assert signature([nn.Sequential(Pure(), made(body))], X) is None


def _parametrized(block: Any) -> None:
    nn.utils.parametrizations.weight_norm(block.fc)


VALUES: dict[str, Callable[[Any], object]] = {
    "function": lambda block: setattr(block, "act", lambda x: x),
    "iterator": lambda block: setattr(block, "ticks", iter([1])),
    "object": lambda block: setattr(block, "seen", [Counter, object()]),
    "hook": lambda block: block.fc.register_forward_hook(lambda *of: None),
    "hook of a parameter": lambda block: setattr(block.fc.weight, "main_grad", None),
    "forward": lambda block: setattr(block.fc, "forward", lambda x: x),
    "parametrized": _parametrized,
}


@pytest.mark.parametrize("what", VALUES)
def test_a_module_that_holds_more_than_tensors_and_plain_values_has_no_signature(what: str) -> None:
    block = Pure()
    VALUES[what](block)
    assert signature([block], X) is None
    assert signature([Pure()], (*X, {"mask": None, "causal": True})) is not None
    assert signature([Pure()], (*X, lambda x: x)) is None, "inputs too"


@pytest.mark.parametrize("place", [(nn.functional, "gelu"), (Tensor, "split"), (nn.Linear, "forward")])
def test_a_function_of_torch_that_a_user_replaced_is_not_trusted(monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    owner, name = place
    plain: Any = getattr(owner, name)

    @wraps(plain)  # copies the name of the module too
    def counted(*of: Any, **named: Any) -> Any:
        return plain(*of, **named)

    assert signature([Pure()], X) is not None
    monkeypatch.setattr(owner, name, counted)
    assert signature([Pure()], X) is None


def test_a_method_that_a_package_adds_to_all_modules_is_refused_only_where_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As transformers does with smart_apply."""

    class Calling(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return self.added_here(x)

    monkeypatch.setattr(nn.Module, "added_here", lambda self, x: x, raising=False)
    assert signature([Pure()], X) is not None
    assert signature([Calling()], X) is None


def test_a_hook_on_all_modules_leaves_no_signature() -> None:
    with nn.modules.module.register_module_forward_hook(lambda *of: None):
        assert signature([Pure()], X) is None


@pytest.mark.parametrize(
    ("after", "n_probes", "expected"),
    [("", 20, [20, 20, 2]), ("", 3, [3, 3, 2]), ("", 2, [2, 2, 2]), (plain_nets.REMEMBER[3], 20, [20, 20, 20])],
)
def test_one_of_equal_units_runs_in_full(
    monkeypatch: pytest.MonkeyPatch, after: str, n_probes: int, expected: list[int]
) -> None:
    """The input of block 0 needs no gradient: another call than those of 1 and 2, which are equal."""
    runs: Counter[str] = Counter()
    plain = unit_calls.UnitCall.recompute

    def counted(call: unit_calls.UnitCall, number: int | None = None) -> list[Tensor]:
        runs[call.unit[0]] += 1
        return plain(call, number)

    monkeypatch.setattr(unit_calls.UnitCall, "recompute", counted)
    model = ModelRef(target=f"{plain_nets.__file__}:net", arguments={"after": after})
    spec = RunSpec(model=model, policy=Policy.recompute(("0", "1", "2")), n_probes=n_probes)
    probed: ProbedStep = probed_step(spec, None, "perturbed", silent)
    assert [runs[name] for name in "012"] == expected
    assert (probed.n_runs, probed.n_twice) == (n_probes, sum(n < n_probes for n in expected))
    assert probed.first == probed.left and math.isfinite(float(probed.first["loss"]))
