"""Facts of blocks in one forward: FLOPs, saved bytes, the end of a recompute, blocks that could be one segment.

FLOPs are exact: against torch's own counter where it counts, against arithmetic where it does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.engine.bench.measure import measure
from explorer.engine.bench.recording import tracker_of
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.watch.flops import MATRIX_KIND, formula, lacks_formula
from explorer.errors import InvalidPolicy
from explorer.plan.hazards.hazards import hazards
from explorer.record import ModelRef, Policy, RunSpec
from tests.engine.graphs import ROW, B, W, Walk, graph, graph_of
from tests.engine.tiny_nets import ref


def test_flops_are_those_of_the_matrix_products() -> None:
    described = graph(Walk())
    assert described.by_fqn["stem"].forward_flops == 2 * B * W * W
    assert described.by_fqn["blocks.1"].forward_flops == 2 * (2 * B * W * 2 * W)
    assert described.by_fqn[""].forward_flops == 2 * B * W * W + 3 * 8 * B * W * W + 2 * B * W * 2


def test_recompute_runs_until_the_last_tensor_is_saved() -> None:
    """A linear layer saves its input before it multiplies; tanh and a norm save what they made."""
    blocks = graph(Walk()).by_fqn
    up, down = (2 * B * W * 2 * W for _ in range(2))
    assert (blocks["blocks.0"].forward_flops, blocks["blocks.0"].rerun_flops) == (up + down, up)
    assert (blocks["blocks.0.down"].forward_flops, blocks["blocks.0.down"].rerun_flops) == (down, 0)
    smooth = graph(nn.Sequential(nn.Linear(W, W), nn.Tanh())).by_fqn[""]
    assert smooth.rerun_flops == smooth.forward_flops == 2 * B * W * W
    assert (blocks["blocks.0"].last_saved_in, blocks["blocks.0.up"].last_saved_in) == ("blocks.0.down", "blocks.0.up")


class Forked(nn.Module):
    """Hands on two tensors: a linear layer saves the first, the second is only added."""

    def __init__(self) -> None:
        super().__init__()
        self.fork = Fork()
        self.after = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x, skip = self.fork(x)
            x = self.after(x) + skip
        return x


class Fork(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), torch.sigmoid(x)


def test_who_else_saves_an_output_is_known_also_of_a_block_called_twice() -> None:
    blocks = graph(Forked(), torch.randn(B, W, requires_grad=True)).by_fqn
    assert blocks["fork"].outputs_saved_outside == (True, False)
    assert graph(nn.Sequential(nn.Tanh(), nn.Tanh())).by_fqn["0"].outputs_saved_outside == (False,)


def test_who_saves_what_a_block_is_given_and_returns() -> None:
    class Beside(nn.Module):
        """tanh saves what it returns, and so does the linear layer that it is given to; x * y saves x as well."""

        def __init__(self) -> None:
            super().__init__()
            self.tanh, self.linear = nn.Tanh(), nn.Linear(W, W)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.linear(self.tanh(x))

    blocks = graph(nn.Sequential(nn.Linear(W, W), Beside())).by_fqn
    assert blocks["1.tanh"].outputs_saved_in == blocks["1.linear"].inputs_saved_in == (("1.linear", "1.tanh"),)
    assert blocks["0"].outputs_saved_in == blocks["1"].inputs_saved_in == blocks["1.tanh"].inputs_saved_in == (("1",),)
    assert blocks["1.linear"].outputs_saved_in == (("1",),)
    assert blocks["1"].outputs_saved_in == (("",),), "the loss squares it"


def test_saved_bytes_are_those_made_in_a_block_whoever_saves_them() -> None:
    described = graph(nn.Sequential(nn.Linear(W, W), nn.Sequential(nn.Tanh(), nn.Sigmoid())))
    assert described.by_fqn["0"].saved_bytes == 0  # tanh keeps its result, not what it was given
    assert described.by_fqn["1.0"].saved_bytes == ROW
    assert described.by_fqn["1"].saved_bytes == 2 * ROW
    model = nn.Sequential(nn.ReLU(), nn.Linear(W, W), nn.Linear(W, W))
    described = graph(model, torch.randn(B, W, requires_grad=True))
    assert [described.by_fqn[fqn].saved_bytes for fqn in ("0", "1", "2", "")] == [
        ROW,
        ROW,
        ROW,
        3 * ROW,
    ]  # the loss saves the last


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x) * scale))


Between = Callable[[Tensor, Tensor, list[Any]], tuple[Tensor, Tensor]]


class Loop(nn.Module):
    """Calls four layers; what happens between the second and the third is the case."""

    def __init__(self, between: Between = lambda x, scale, kept: (x, scale)) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(8, 8)
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Any] = []
        scale = x.mean()
        for i, layer in enumerate(self.layers):
            if i == 2:
                x, scale = self._between(x, scale, kept)
            x = layer(x, scale)
        for one in kept:
            x = x + one
        return self.head(x)


BETWEEN: dict[str, Between] = {
    "another argument": lambda x, scale, kept: (x, scale * 2),
    "added to": lambda x, scale, kept: (x + 1, scale),
    "collected": lambda x, scale, kept: (x, scale, kept.append(x))[:2],
    "decided": lambda x, scale, kept: (x, scale) if bool(scale.abs() < 1e9) else (-x, scale),
    "drawn": lambda x, scale, kept: (x, scale, torch.rand(()))[:2],
    "drawn by Python": lambda x, scale, kept: (x, scale, random.random())[:2],
}


def follows(model: nn.Module) -> list[str | None]:
    graph = graph_of(model, torch.randn(4, 8))
    return [graph.by_fqn[f"layers.{i}"].follows for i in range(4)]


def test_layers_that_are_called_one_after_the_other_follow_each_other() -> None:
    assert follows(Loop()) == ["", "layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("between", BETWEEN)
def test_a_layer_before_which_more_happens_follows_none(between: str) -> None:
    graph = graph_of(Loop(BETWEEN[between]), torch.randn(4, 8))
    assert [graph.by_fqn[f"layers.{i}"].follows for i in range(4)] == ["", "layers.0", "", "layers.2"]
    across, aside = Policy.recompute([("layers.1", "layers.2")]), Policy.recompute([("layers.0", "layers.1")])
    fired = [hazard for hazard in hazards(graph, across) if hazard.rule == "segment-apart"]
    assert len(fired) == 1 and "layers.1 and layers.2" in fired[0].sentence and fired[0].severity == "error"
    assert not [hazard for hazard in hazards(graph, aside) if hazard.rule == "segment-apart"]


@pytest.mark.parametrize("between", ["another argument", "added to", "collected"])
def test_a_segment_across_such_a_layer_is_refused(between: str) -> None:
    model = Loop(BETWEEN[between])
    with apply_policy(model, Policy.recompute([("layers.1", "layers.2")])), pytest.raises(InvalidPolicy):
        model(torch.randn(4, 8)).sum().backward()
    with apply_policy(model, Policy.recompute([("layers.0", "layers.1"), ("layers.2", "layers.3")])):
        model(torch.randn(4, 8)).sum().backward()


def test_what_the_model_returns_is_read_by_others() -> None:
    class Returning(Loop):
        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
            scale, states = x.mean(), []
            for layer in self.layers:
                x = layer(x, scale)
                states.append(x)
            return self.head(x), states[1:2]

    assert follows(Returning()) == ["", "layers.0", "", "layers.2"]


def test_a_loop_that_is_walked_twice() -> None:
    class Twice(Loop):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.mean()
            for _ in range(2):
                for layer in self.layers:
                    x = layer(x, scale)
            return self.head(x)

    assert follows(Twice()) == ["", "layers.0", "layers.1", "layers.2"]


class Count(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := formula(func)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def counted(step: Callable[[], object]) -> int:
    with Count() as count:
        step()
    return count.total


def test_fused_attention_counts_its_two_products() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    assert counted(lambda: F.scaled_dot_product_attention(q, k, v)) == 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_fused_attention_backward_counts_five_products() -> None:
    """Scores once more, then gradients of values, weights, queries and keys."""
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v).sum()
    assert counted(out.backward) == 5 * (2 * 2 * 4 * 16 * 16 * 8)


@pytest.mark.parametrize("n_layers", [1, 2])
def test_a_fused_lstm_multiplies_each_token_with_each_weight(n_layers: int) -> None:
    layer = torch.nn.LSTM(8, 16, n_layers, batch_first=True)
    x = torch.randn(3, 5, 8, requires_grad=True)
    n_weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    out, _ = layer(x)
    assert counted(lambda: layer(x)) == 2 * 3 * 5 * n_weights
    assert counted(out.sum().backward) == 2 * 2 * 3 * 5 * n_weights


OFFSETS = torch.tensor([3, 8], dtype=torch.int32)
POINT = 2 * 2 * 64 * 6 * 9  # two FLOPs, two images of 8 x 8 points, six output channels, a kernel of 3 x 3
# Forward and backward by hand, in multiply-adds of two FLOPs: backward makes two gradients, each at the price of
# forward. A channel of a grouped convolution meets the channels of its own group alone.
BY_HAND: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]], int, int]] = {
    "dense": (lambda x, w: F.conv2d(x, w, padding=1), [(2, 6, 8, 8), (6, 6, 3, 3)], 6 * POINT, 12 * POINT),
    "depthwise": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=6), [(2, 6, 8, 8), (6, 1, 3, 3)], POINT, 2 * POINT,
    ),
    "grouped": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=2), [(2, 6, 8, 8), (6, 3, 3, 3)], 3 * POINT, 6 * POINT,
    ),
    "one dimension": (
        lambda x, w: F.conv1d(x, w, groups=4), [(2, 4, 10), (8, 1, 3)], 2 * 2 * 8 * 8 * 3, 2 * 2 * 2 * 8 * 8 * 3,
    ),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=3), [(2, 6, 5, 5), (6, 4, 3, 3)],
        2 * 2 * 25 * 6 * 4 * 9, 2 * 2 * 2 * 25 * 6 * 4 * 9,
    ),
    "tokens first": (
        lambda x, w, b: torch.conv_tbc(x, w, b), [(9, 2, 3), (3, 3, 4), (4,)], 2 * 7 * 2 * 9 * 4, 2 * 2 * 7 * 2 * 9 * 4,
    ),
    "rows dealt out to experts": (
        lambda x, w: F.grouped_mm(x, w, offs=OFFSETS), [(8, 8), (2, 8, 16)], 2 * 8 * 8 * 16, 2 * 2 * 8 * 8 * 16,
    ),
    "one product an expert": (
        lambda x, w: F.grouped_mm(x, w), [(2, 8, 8), (2, 8, 16)], 2 * 2 * 8 * 8 * 16, 2 * 2 * 2 * 8 * 8 * 16,
    ),
    # Two products each time: one over three or four of the sizes b 3, o 4, i 5, j 7, then one over the rest.
    "bilinear": (
        F.bilinear, [(3, 5), (3, 7), (4, 5, 7)],
        2 * (3 * 4 * 5 * 7 + 3 * 4 * 7), 2 * (2 * 420 + (3 * 4 * 5 + 420) + (420 + 3 * 4 * 7)),
    ),
    # |a - b|² as one product of vectors longer by two; backward is two plain products.
    "distances": (torch.cdist, [(2, 30, 3), (2, 7, 3)], 2 * 2 * 30 * 7 * (3 + 2), 2 * (2 * 2 * 30 * 7 * 3)),
    # The gradient of the matrix is an outer product, element by element.
    "matrix and vector": (torch.mv, [(5, 6), (6,)], 2 * 5 * 6, 2 * 5 * 6),
    "matrix, vector and sum": (torch.addmv, [(5,), (5, 6), (6,)], 2 * 5 * 6, 2 * 5 * 6),
    "two vectors": (torch.dot, [(6,), (6,)], 2 * 6, 0),
    "sum of products": (
        torch.addbmm, [(4, 5), (3, 4, 6), (3, 6, 5)], 2 * 3 * 4 * 5 * 6, 2 * 2 * 3 * 4 * 5 * 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_forward_and_backward_count_what_a_hand_counts(case: str) -> None:
    function, shapes, forward, backward = BY_HAND[case]
    values = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = function(*values)
    slope = torch.ones_like(out)
    assert counted(lambda: function(*values)) == forward
    assert counted(lambda: out.backward(slope)) == backward


def test_an_input_that_needs_no_gradient_saves_half_of_a_convolutions_backward() -> None:
    weight = torch.randn(6, 1, 3, 3, requires_grad=True)
    out = F.conv2d(torch.randn(2, 6, 8, 8), weight, padding=1, groups=6).sum()
    assert counted(out.backward) == POINT


def test_a_product_written_into_its_first_argument_counts_as_any_other() -> None:
    left, right = torch.randn(4, 6), torch.randn(6, 5)
    assert counted(lambda: torch.zeros(4, 5).addmm_(left, right)) == 2 * 4 * 6 * 5


# One batch entry of the reference GPT (width 256, 6 blocks, 128 tokens, vocabulary 1000, explicit attention):
# every matrix product scales with the batch, so the ratios are those of any batch.
REFERENCE = {"width": 256, "depth": 6, "length": 128, "vocabulary": 1000, "batch": 1}
RATIOS = [
    (Policy.recompute([f"blocks.{i}" for i in range(6)]), 0.0, 1.220),
    (Policy.recompute([f"blocks.{i}" for i in range(6)]), 0.1, 1.317),
    (Policy.recompute([f"blocks.{i}" for i in range(6)], use_reentrant=True), 0.0, 1.317),
    (Policy.recompute(["blocks.0", "blocks.2", "blocks.4"]), 0.0, 1.110),
]


@cache
def total_flops(policy: Policy, dropout: float) -> int:
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("gpt", dropout=dropout, **REFERENCE), policy=policy, optimizer="none"))
        with tracker_of(trainee) as tracker:
            run_step(trainee, tracker.on_phase)
    return sum(tracker.flops.values())


@pytest.mark.parametrize(("policy", "dropout", "ratio"), RATIOS)
def test_recompute_costs_what_the_reference_costs(policy: Policy, dropout: float, ratio: float) -> None:
    plain = total_flops(Policy(), dropout)
    assert plain * 4 == pytest.approx(16.490e9, abs=0.001e9)
    assert total_flops(policy, dropout) / plain == pytest.approx(ratio, abs=0.0006)


MIXER = """
import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        basis, _ = torch.linalg.qr(self.mix(x))
        return torch.fft.rfft(basis).abs()


def build():
    return Mixer(), torch.randn(4, 8)
"""


def test_a_run_names_the_operators_that_its_flops_leave_out(tmp_path: Path) -> None:
    (tmp_path / "mixer.py").write_text(MIXER)
    run = measure(RunSpec(model=ModelRef(target=f"{tmp_path / 'mixer.py'}:build"), n_repeats=0))
    assert run.failure is None
    assert run.uncounted_ops["aten.linalg_qr.default"] == 1
    assert run.uncounted_ops["aten._fft_r2c.default"] == 1
    assert all(lacks_formula(getattr(torch.ops.aten, name.split(".")[1])) for name in run.uncounted_ops)
    assert run.forward_flops == 2 * 4 * 8 * 8


def test_a_run_whose_operators_all_have_a_formula_names_none() -> None:
    run = measure(RunSpec(model=ref("chain"), n_repeats=0))
    assert run.uncounted_ops == {}


def test_what_has_a_formula_or_is_element_wise_is_not_named() -> None:
    names = ("mm", "addmm_", "convolution", "_grouped_mm", "relu", "native_layer_norm")
    operators = [getattr(torch.ops.aten, name).default for name in names]
    assert not any(map(lacks_formula, (*operators, torch.ops.aten.add.Tensor)))


def test_an_operator_of_another_library_is_named() -> None:
    with torch.library._scoped_library("explorer_tests", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        assert lacks_formula(torch.ops.explorer_tests.unknown.default)


def test_every_name_of_the_list_is_an_operator_of_torch() -> None:
    """A name that torch drops would be looked for in vain."""
    known = {schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    assert not MATRIX_KIND - known
