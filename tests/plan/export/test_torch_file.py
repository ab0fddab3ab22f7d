"""An exported file is run, with torch alone, and gives bit by bit what explorer.apply_policy gives."""

from __future__ import annotations

import ast
import copy
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import explorer
from explorer.plan.export.formats import exported
from explorer.plan.policy import file as policy_file
from explorer.record.files import Evidence, PolicyFile
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy, Unit
from tests.plan.export.runs import module_of

Tensors = dict[str, Tensor | None]


class Noisy(nn.Module):
    """Draws from Python's generator and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.own)
        return torch.tanh(self.linear(x)) * (1 + noise) * (1 + random.random())


class Scaled(nn.Module):
    """Takes what is the same for all blocks by keyword, in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scales: tuple[Tensor, Tensor]) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x)) * scales[0])) * scales[1]


class Net(nn.Module):
    adds_in_between = False

    def __init__(self) -> None:
        super().__init__()
        layer = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3))  # noqa: E731
        self.stem = nn.Sequential(*[layer() for _ in range(4)])
        self.blocks = nn.ModuleList([layer() for _ in range(2)])
        self.noisy = Noisy()
        self.loop = nn.ModuleList([Scaled() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        scales = x.mean().sigmoid(), x.std()
        for block in self.loop:
            x = block(x, scales=scales)
            x = x + 1 if self.adds_in_between else x
        return self.noisy(x)


def step(change: Callable[[nn.Module], object]) -> tuple[Tensors, Tensors]:
    torch.manual_seed(0)
    random.seed(0)
    net = Net()
    change(net)
    for _ in range(2):
        net(torch.randn(16, 8)).square().mean().backward()
    return {name: p.grad for name, p in net.named_parameters()}, dict(net.named_buffers())


def assert_same(expected: Tensors, actual: Tensors) -> None:
    assert expected.keys() == actual.keys()
    wrong = [name for name, value in expected.items() if value is not actual[name] and not equal(value, actual[name])]
    assert not wrong, wrong


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


SEGMENTS = (Unit(blocks=("stem.0", "stem.1")), Unit(blocks=("stem.2", "stem.3")))
LOOP = (Unit(blocks=("loop.0", "loop.1", "loop.2")),)
SINGLES = (Unit(blocks=("blocks.0",)), Unit(blocks=("noisy",)))
EVERY_RNG = ("python", "noisy.own")
POLICIES = {
    "nothing": Policy(),
    "segments and singles": Policy(units=SEGMENTS + SINGLES, restore_rng=EVERY_RNG),
    "a loop": Policy(units=(*LOOP, Unit(blocks=("loop.1.linear",)), *SEGMENTS)),
    "a saving loop": Policy(
        units=(Unit(blocks=("loop.2", "loop.3"), action="save_ops", save_ops=("aten.addmm.default",)),)
    ),
    "nested": Policy(units=(Unit(blocks=("stem",)), *SEGMENTS, Unit(blocks=("stem.1.1",))), restore_rng=EVERY_RNG),
    "statistics every forward": Policy(units=SEGMENTS, running_stats="every_forward"),
    "no rng": Policy(units=SEGMENTS, preserve_rng_state=False),
    "no early stop": Policy(units=SINGLES, early_stop=False, determinism_check="none", restore_rng=("python",)),
    "reentrant": Policy(units=(Unit(blocks=("blocks.1",)), *SINGLES), use_reentrant=True, restore_rng=EVERY_RNG),
    "save operators": Policy(units=(Unit(blocks=("blocks.1",), action="save_ops", save_ops=("aten.addmm.default",)),)),
    "offload": Policy(units=(Unit(blocks=("blocks.1",), action="offload"),)),
}


def applied(policy: Policy) -> Callable[[nn.Module], object]:
    """The function of the exported file."""
    apply: Callable[[nn.Module], object] = module_of(PolicyFile(policy=policy), "torch").apply_checkpointing
    return apply


@pytest.mark.parametrize("name", POLICIES)
def test_the_exported_file_does_what_the_explorer_does(name: str) -> None:
    policy = POLICIES[name]
    ours = step(lambda net: explorer.apply_policy(net, policy))
    theirs = step(applied(policy))
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])


def test_it_differs_where_the_policy_makes_a_difference() -> None:
    plain = step(lambda net: None)
    faithful = step(applied(POLICIES["nested"]))
    assert_same(plain[0], faithful[0])
    for name in ("statistics every forward", "no rng"):
        gradients, buffers = step(applied(POLICIES[name]))
        with pytest.raises(AssertionError):
            assert_same(plain[0] | plain[1], gradients | buffers)


def test_a_loop_that_does_more_in_between_is_refused() -> None:
    net = Net()
    net.adds_in_between = True
    applied(POLICIES["a loop"])(net)
    words = r"What loop\.0 returns was to go to loop\.1 alone, and add reads it.*one by one"
    with pytest.raises(ValueError, match=words):
        net(torch.randn(4, 8))


def test_copies_and_pickles_of_a_loop_use_their_own_weights() -> None:
    applied(POLICIES["a loop"])(net := Net().eval())
    torch.manual_seed(0)
    x, state = torch.randn(4, 8), random.getstate()
    outputs = []
    for one in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net.loop))):
        random.setstate(state)
        scales = x.mean(), x.std()
        value = x
        for block in getattr(one, "loop", one):
            value = block(value, scales=scales)
        outputs.append(value)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_copies_and_pickles_use_their_own_weights() -> None:
    net = Net().eval()
    names = list(net.state_dict())
    applied(POLICIES["segments and singles"])(net)
    assert list(net.state_dict()) == names
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(torch.randn(4, 8)).any() and net(torch.randn(4, 8)).any()
    restored = pickle.loads(pickle.dumps(net.stem))
    x = torch.randn(4, 8)
    assert torch.equal(restored(x), net.stem(x))


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no block layers\.0: this file was made for another model"):
        applied(Policy.recompute(["layers.0", "stem"]))(Net())


def test_the_file_needs_torch_alone_and_says_where_it_comes_from() -> None:
    evidence = Evidence(
        device="a CPU\nimport os", torch_version="2.13.0", step_peak_bytes=1000, baseline_step_peak_bytes=3000,
        time_ratio=1.25, time_ratio_spread=0.02, verdict="bitwise equal",
    )  # fmt: skip
    model = ModelRef(target="net.py:Net")
    file = PolicyFile(policy=POLICIES["nested"], model=model, fingerprint="abc", evidence=evidence)
    text = exported(file, "torch").text
    made_for, peak = "Made for net.py:Net, fingerprint abc", "1,000 bytes instead of 3,000"
    assert all(words in text for words in (made_for, peak, "x1.25 +- 0.02", "bitwise equal"))
    assert "\nimport os" not in text
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert {name.partition(".")[0] for name in modules} <= {"torch", *sys.stdlib_module_names}


def test_a_policy_file_on_disk_is_exported(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(policy_file.dumps(PolicyFile(policy=Policy.recompute(['stem."0"', "a\\", "@ORIGIN@"]))))
    module = module_of(policy_file.load(path), "torch")
    assert [unit[0] for unit in module.UNITS] == [('stem."0"',), ("a\\",), ("@ORIGIN@",)]
