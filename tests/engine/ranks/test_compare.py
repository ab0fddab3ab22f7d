"""Sharded steps of real gloo ranks: their verdicts, and memory and collectives as predicted."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.ranks import MODELS, SPLITS, calls_of
from explorer.engine.ranks import compare
from explorer.engine.ranks.compare import compare_ranks, judge_rank
from explorer.engine.ranks.predict import predict_ranks
from explorer.engine.ranks.real import run_on_ranks
from explorer.record.base import Record
from explorer.record.comparison import Comparison, Verdict
from explorer.record.graph import ModelRef
from explorer.record.plan import Progress, silent
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import Ranks, RunSpec

LAYERS = Policy.recompute(["layers.0", "layers.1"])
PRODUCTS = Policy(
    units=tuple(Unit(blocks=(x,), action="save_ops", save_ops=("aten.addmm.default",)) for x in LAYERS.blocks)
)
BLOCKS = Policy.recompute(["blocks.0", "blocks.2"])


def forgets_to_sum(model: nn.Module, mesh: DeviceMesh) -> None:
    pass


def freezes(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.get_submodule("down").requires_grad_(False)


class Routed(nn.Module):
    """Four experts in one grouped product, as transformers runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 4), nn.Parameter(torch.randn(4, 64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort()
        ends = torch.histc(expert[order].float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        chosen = torch.nn.functional.grouped_mm(x[order], self.experts, offs=ends)
        return x + weight[:, None] * torch.empty_like(chosen).index_copy(0, order, chosen)


def routed() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 64), *(Routed() for _ in range(2))), torch.randn(32, 64)


def spec_of(model: str, ranks: Ranks, policy: Policy = KEEP_ALL, n_layers: int = 2) -> RunSpec:
    arguments = {} if model == "picture" else {"n_layers": n_layers}
    return RunSpec(model=ModelRef(target=f"{MODELS}:{model}", arguments=arguments), policy=policy, ranks=ranks)


EQUAL: list[tuple[RunSpec, Verdict]] = [
    (spec_of("tied", SPLITS["fsdp"], LAYERS), "bitwise equal"),
    (spec_of("transformer", SPLITS["tp"], PRODUCTS), "rounding"),
    (spec_of("tied", SPLITS["fsdp-tp"], n_layers=1), "rounding"),
]
COPIES = spec_of("picture", SPLITS["ddp"], BLOCKS)
ROUTED = RunSpec(model=ModelRef(target=f"{__file__}:routed"), dtype="bfloat16", ranks=SPLITS["fsdp"])
ALONE = spec_of("picture", Ranks(n_ranks=2, data="none", parallelize=f"{__file__}:forgets_to_sum"))
LOST = spec_of("picture", Ranks(n_ranks=2, data="none", n_tensor=2, parallelize=f"{__file__}:freezes"))


class Verdicts(Record):
    of: tuple[Comparison, ...]


def judge_each(spec: RunSpec) -> Verdicts:
    """On each rank: the comparisons of all specs that have as many ranks as the group."""
    specs = [*(spec for spec, _ in EQUAL), COPIES, ALONE, LOST, ROUTED]
    n_ranks = distributed.get_world_size()
    return Verdicts(of=tuple(judge_rank(spec) for spec in specs if spec.ranks and spec.ranks.n_ranks == n_ranks))


@pytest.fixture(scope="module")
def verdicts() -> list[Comparison]:
    """The comparisons of each rank, from one start for each number of ranks."""
    starts = [run_on_ranks(judge_each, first, Verdicts, silent) for first in (ALONE, EQUAL[-1][0])]
    return [comparison for ranks in starts for verdicts in ranks for comparison in verdicts.of]


def found(verdicts: list[Comparison], spec: RunSpec) -> Comparison:
    """That of rank 0, which comes first."""
    return next(one for one in verdicts if one.candidate.spec == spec)


@pytest.mark.slow
def test_a_sharded_step_is_the_unsharded_one(verdicts: list[Comparison]) -> None:
    """Two summands have one order, so gradients of two ranks are equal bit by bit; a split product rounds."""
    for spec, verdict in EQUAL:
        of = found(verdicts, spec)
        assert (of.verdict, of.failure, of.n_steps) == (verdict, None, 2)
        assert of.n_gradients == len(of.gradients) > 16 and of.candidate.step_peak_bytes


@pytest.mark.slow
def test_real_ranks_hold_what_was_predicted(verdicts: list[Comparison]) -> None:
    """To the byte, with equal collectives. The whole matrix, under torchrun, is `python -m benchmarks.ranks`.

    The tracker of a real step does not see the generator's state of a live checkpoint, the allocator does.
    """
    for spec in (*(spec for spec, _ in EQUAL), COPIES, ROUTED):
        real, predicted = found(verdicts, spec).candidate, predict_ranks(spec).by_rank[0]
        assert real.peaks.tracker_peak_bytes and predicted.step_peak_bytes
        assert (predicted.step_peak_bytes - real.peaks.tracker_peak_bytes) % 5_056 == 0
        if spec in (equal for equal, _ in EQUAL):
            assert 0 <= (real.step_peak_bytes or 0) - predicted.step_peak_bytes <= 2 * 8
        assert calls_of(real) == calls_of(predicted) and len(real.collectives) > 2


@pytest.mark.slow
def test_what_the_allocator_sees_beyond_the_tensors_is_explained(verdicts: list[Comparison]) -> None:
    """A state of the generator and a number for each checkpoint alive; on the mesh a number."""
    for (spec, _), n_bytes in zip(EQUAL, (5_056 + 8, 2 * (5_056 + 8), 8)):
        real = found(verdicts, spec).candidate
        assert real.step_peak_bytes and real.peaks.tracker_peak_bytes
        assert real.step_peak_bytes - real.peaks.tracker_peak_bytes == n_bytes


@pytest.mark.slow
def test_gradients_that_are_never_summed_or_lost_are_named(verdicts: list[Comparison]) -> None:
    alone, lost = found(verdicts, ALONE), found(verdicts, LOST)
    assert alone.verdict == "different" and alone.n_bitwise_equal == 0
    assert lost.verdict == "different"
    assert found(verdicts, ROUTED).verdict == "bitwise equal"
    assert [one.name for one in lost.gradients if one.presence == "baseline only"] == ["down.weight", "down.bias"]
    assert any("down.weight" in cause for cause in lost.causes)


@pytest.mark.slow
def test_both_steps_of_a_comparison_are_measured_and_no_run_is_reported_as_a_comparison(
    verdicts: list[Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, told = replace(COPIES, n_repeats=0), list[Progress]()

    def both_ranks(function: object, asked: RunSpec, *rest: object) -> list[Comparison]:
        assert function is judge_rank
        return [one for one in verdicts if replace(one.candidate.spec, n_repeats=0) == asked]

    monkeypatch.setattr(compare, "run_on_ranks", both_ranks)
    of = compare_ranks(COPIES, told.append)
    assert of.verdict == "bitwise equal" and told and not any(progress.part for progress in told)
    assert replace(of.candidate.spec, n_repeats=0) == spec and of.baseline.spec.ranks is None
    assert of.candidate.step_peak_bytes and of.baseline.step_peak_bytes
