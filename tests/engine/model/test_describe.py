"""The graph of one forward: blocks with calls, bytes and parameters, the chain of blocks, and its cuts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor, nn

from explorer.engine.bench.measure import measure
from explorer.engine.device.memory_limit import process_memory_limit
from explorer.engine.model import describe as describing
from explorer.engine.model.blocks import has_running_statistics, module_fields
from explorer.engine.model.describe import describe
from explorer.engine.model.loaded import Loaded
from explorer.errors import Cancelled, ModelFailed
from explorer.record.graph import Conditions, ModelGraph, ModelRef
from explorer.record.plan import Progress
from explorer.record.run import Device, RunSpec
from tests.engine import tiny_nets
from tests.engine.graphs import ROW, B, W, Walk, graph


def test_blocks_come_in_module_order_with_calls_parameters_and_repeats() -> None:
    model = Walk()
    described = graph(model)
    assert [block.fqn for block in described.blocks] == [fqn for fqn, _ in model.named_modules()]
    assert (described.by_fqn[""].n_calls, described.by_fqn["blocks"].n_calls, described.by_fqn["unused"].n_calls) == (
        1,
        0,
        0,
    )
    assert described.by_fqn["stem"].parameter_bytes == (W * W + W) * 4
    assert described.by_fqn["stem"].own_parameters == ("stem.weight", "stem.bias")
    assert module_fields("blocks.0", nn.BatchNorm1d(2))["buffer_bytes"] == (2 + 2) * 4 + 8
    assert described.by_fqn[""].parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert described.n_parameters == sum(p.numel() for p in model.parameters())
    assert [described.by_fqn[f"blocks.{i}"].repeat_of for i in range(3)] == [None, "blocks.0", "blocks.0"]
    assert described.repeats == ("blocks.0", "blocks.1", "blocks.2")
    assert described.input_shapes == ((B, W),)


class Numbered(nn.Module):
    """Equal attributes: layers called in turn, and norms that are not."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            setattr(self, f"layer{i}", nn.Linear(W, W))
        self.norm1, self.norm2, self.encoder, self.decoder = (nn.LayerNorm(W) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x)
        for i in range(3):
            x = getattr(self, f"layer{i}")(x).relu()
        return self.decoder(self.encoder(self.norm2(x))).sum()


def test_numbered_attributes_called_in_turn_are_repeats_and_other_equal_ones_are_not() -> None:
    blocks = graph(Numbered()).by_fqn
    repeats = {fqn: block.repeat_of for fqn, block in blocks.items() if block.repeat_of is not None}
    assert repeats == {"layer1": "layer0", "layer2": "layer0"}


def test_what_no_block_makes_is_distinct_texts() -> None:
    assert graph(Numbered()).outside_bytes == 3 * ROW + 4, "three results of relu, and the sum that the loss squares"
    assert graph(Walk()).outside_bytes == 0


def test_a_container_holds_what_its_children_do() -> None:
    blocks = graph(Walk()).by_fqn
    children = [blocks[f"blocks.{i}"] for i in range(3)]
    assert blocks["blocks"].n_calls == 0
    assert blocks["blocks"].forward_flops == sum(child.forward_flops for child in children)
    assert blocks["blocks"].saved_bytes == sum(child.saved_bytes for child in children) > 0


def test_the_graph_does_not_depend_on_where_tensors_come_to_lie() -> None:
    """Addresses are handed out again: an output that died must not be taken for what lies there later."""
    torch.manual_seed(0)
    model, kept = Walk(8), []
    graphs = []
    for i in range(4):
        kept.append(torch.empty(ROW // 4 * (i % 3)))  # the allocator's lists differ a little every time
        graphs.append(graph(model))
    assert all(described == graphs[0] for described in graphs[1:])
    assert graphs[0].by_fqn["blocks.3.down"].outputs_saved_outside == (False,)
    assert graphs[0].by_fqn["blocks.3"].outputs_saved_outside == (True,)


SMALL: dict[str, dict[str, int | float]] = {
    "gpt": {"n_layers": 2, "width": 8, "n_heads": 2, "length": 4, "batch": 2, "vocabulary": 8},
    "recurrent": {"length": 3, "width": 8, "expansion": 2, "batch": 2, "vocabulary": 8},
    "unet": {"width": 4, "depth": 2, "side": 8, "batch": 1},
}


@pytest.mark.parametrize("name", SMALL)
def test_every_block_keeps_what_a_measurement_charges_to_it(name: str) -> None:
    """One definition on the page before a run, after it, and on the command line. (MoE routes at random.)

    A measurement also knows the scalars of 8 bytes that attention makes below every operator.
    """
    ref = ModelRef(target=f"sample_models/{name}.py", arguments=SMALL[name])
    described, measured = describe(ref), measure(RunSpec(model=ref, n_repeats=0)).by_fqn
    for block in described.blocks[1:]:
        more = measured[block.fqn].saved_after_forward_bytes - block.saved_bytes
        n_attentions = SMALL[name]["n_layers"] if name == "gpt" else 0
        assert 0 <= more <= 16 * n_attentions and more % 8 == 0, block.fqn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, W)
        self.body = nn.Sequential(nn.Linear(W, W), nn.Tanh())
        self.head = nn.Linear(W, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))


def test_shared_parameters_are_named_on_both_sides_and_counted_once() -> None:
    described = graph(Tied(), torch.randint(9, (B, 3)))
    assert described.by_fqn["embedding"].shares_parameters_with == ("head",)
    assert described.by_fqn["head"].shares_parameters_with == ("embedding",)
    assert described.by_fqn["body"].shares_parameters_with == described.by_fqn[""].shares_parameters_with == ()
    assert described.by_fqn[""].parameter_bytes == (9 * W + W * W + W) * 4


def test_the_fingerprint_knows_the_model_and_not_the_batch() -> None:
    prints = {graph(Walk(), torch.randn(n, W)).fingerprint for n in (1, 2, 5)}
    assert len(prints) == 1
    assert graph(Walk(4)).fingerprint not in prints


def test_a_forward_that_fails_shows_the_batch_and_leaves_no_hook() -> None:
    model = Walk()
    with pytest.raises(ModelFailed, match=r"RuntimeError.*float32\[4, 3\]"):
        graph(model, torch.randn(B, 3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_progress_is_told_and_can_cancel() -> None:
    ref = ModelRef(target="sample_models/mlp.py", arguments={"n_layers": 1, "batch": 2})
    told: list[Progress] = []
    describe(ref, report=told.append)
    assert [progress.done for progress in told] == sorted(progress.done for progress in told)

    def cancel(progress: Progress) -> None:
        raise Cancelled("A person cancelled.")

    with pytest.raises(Cancelled):
        describe(ref, report=cancel)


def test_a_model_whose_step_does_not_fit_is_described_in_the_memory_of_its_forward() -> None:
    """Its step keeps more than 256 MiB."""
    with process_memory_limit(150 << 20):
        described = describe(tiny_nets.ref("wide", mib=10, depth=3))
    assert described.by_fqn[""].saved_bytes > 1 << 28
    assert described.by_fqn["1"].saved_bytes > 1 << 26


def test_a_model_that_takes_gradients_in_its_forward_is_described() -> None:
    described = describe(tiny_nets.ref("penalised"))
    assert described.by_fqn["lin"].n_calls == 1 and described.by_fqn[""].saved_bytes


def test_what_does_not_fit_on_the_device_is_watched_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    real = describing._watched

    def watched(own: Loaded, another: Callable[[], Loaded], device: str, conditions: Conditions) -> ModelGraph:
        tried.append(device)
        if device == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(own, another, "cpu", conditions)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(describing, "_watched", watched)
    described = describe(tiny_nets.ref("gpt"), device="cuda")
    assert tried == ["cuda", "cpu"]
    assert "does not fit on cuda" in described.note and described.device == "cpu"
    assert msgspec.structs.replace(described, note="") == describe(tiny_nets.ref("gpt"))


@pytest.mark.parametrize(("there", "device"), [(False, "cuda"), (True, "cpu")])
def test_the_graph_is_watched_on_the_cpu(there: bool, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, and for a run on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert describe(tiny_nets.ref("gpt"), device=device).device == "cpu"


def test_the_spine_and_its_cuts() -> None:
    described = graph(Walk())
    assert described.chain == ("stem", "blocks.0", "blocks.1", "blocks.2", "head")
    assert [(cut.after, cut.before) for cut in described.cuts] == list(zip(described.chain, described.chain[1:]))
    assert {(cut.n_bytes, cut.n_tensors, cut.refusal) for cut in described.cuts} == {(ROW, 1, None)}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(W, W)
        self.other = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(torch.tanh(self.other(self.same(x))))


def test_a_block_on_both_sides_refuses_the_cut() -> None:
    described = graph(Twice())
    assert described.by_fqn["same"].n_calls == 2
    assert [(cut.after, cut.before, bool(cut.refusal)) for cut in described.cuts] == [("same", "other", True)]


def test_skips_cross_a_cut_as_further_tensors() -> None:
    described = describe(
        ModelRef(target="sample_models/unet.py", arguments={"width": 4, "side": 8, "batch": 1, "depth": 2})
    )
    assert [cut.n_tensors for cut in described.cuts] == [2, 3, 3, 2, 1]
    assert all(cut.refusal is None for cut in described.cuts)


def test_experts_beside_each_other_are_no_spine() -> None:
    small = {"n_layers": 2, "width": 8, "length": 4, "batch": 2, "vocabulary": 8}
    described = describe(ModelRef(target="sample_models/moe.py", arguments=small))
    assert described.chain == ("embedding", "blocks.0", "blocks.1", "norm", "head")


@pytest.mark.parametrize(("module", "moves"), [
    (nn.BatchNorm1d(2), True),
    (nn.InstanceNorm1d(2, track_running_stats=True), True),
    (nn.InstanceNorm1d(2), False),
    (nn.BatchNorm1d(2, track_running_stats=False), False),
    (nn.LayerNorm(2), False),
])  # fmt: skip
def test_norms_whose_forward_moves_a_mean(module: nn.Module, moves: bool) -> None:
    assert has_running_statistics(module) == moves


@pytest.mark.slow  # the process compiles
@pytest.mark.filterwarnings("ignore:Using .torch.compile:UserWarning")
def test_a_compiled_block_with_modules_inside_is_described() -> None:
    """The compiler meets the hooks of the modules inside, and leaves them alone."""
    inside = nn.Sequential(nn.Linear(W, W), nn.GELU())
    model = nn.Sequential(nn.Linear(W, W), torch.compile(inside, backend="aot_eager"))
    assert graph(model).by_fqn["1"].saved_bytes
