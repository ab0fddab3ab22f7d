"""Sharded steps of real gloo ranks: their verdicts, and memory and collectives as predicted."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.ranks import MODELS, SPLITS, calls_of
from explorer.engine.ranks.compare import compare_ranks, judge_rank
from explorer.engine.ranks.predict import predict_ranks
from explorer.engine.ranks.real import run_on_ranks
from explorer.record.base import Record
from explorer.record.comparison import Comparison, Verdict
from explorer.record.graph import ModelRef
from explorer.record.plan import Progress, silent
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.ranks import Ranks
from explorer.record.run import RunSpec

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


def spec_of(model: str, ranks: Ranks, policy: Policy = KEEP_ALL) -> RunSpec:
    arguments = {} if model == "picture" else {"n_layers": 2}
    return RunSpec(model=ModelRef(target=f"{MODELS}:{model}", arguments=arguments), policy=policy, ranks=ranks)


EQUAL: list[tuple[RunSpec, Verdict]] = [
    (spec_of("tied", SPLITS["fsdp"], LAYERS), "bitwise equal"),
    (spec_of("transformer", SPLITS["tp"], PRODUCTS), "rounding"),
    (spec_of("tied", SPLITS["fsdp-tp"]), "rounding"),
]
COPIES = spec_of("picture", SPLITS["ddp"], BLOCKS)
ALONE = spec_of("picture", Ranks(n_ranks=2, data="none", parallelize=f"{__file__}:forgets_to_sum"))
LOST = spec_of("picture", Ranks(n_ranks=2, data="none", n_tensor=2, parallelize=f"{__file__}:freezes"))


class Verdicts(Record):
    of: tuple[Comparison, ...]


def judge_each(spec: RunSpec) -> Verdicts:
    """On each rank: the comparisons of all specs that have as many ranks as the group."""
    specs = [*(spec for spec, _ in EQUAL), COPIES, ALONE, LOST]
    n_ranks = distributed.get_world_size()
    return Verdicts(of=tuple(judge_rank(spec) for spec in specs if spec.ranks and spec.ranks.n_ranks == n_ranks))


@pytest.fixture(scope="module")
def verdicts() -> list[Comparison]:
    """The comparisons of rank 0, from one start for each number of ranks."""
    starts = [run_on_ranks(judge_each, first, Verdicts, silent)[0].of for first in (ALONE, EQUAL[-1][0])]
    return [comparison for of in starts for comparison in of]


def found(verdicts: list[Comparison], spec: RunSpec) -> Comparison:
    return next(one for one in verdicts if one.candidate.spec == spec)


@pytest.mark.slow
def test_a_sharded_step_is_the_unsharded_one(verdicts: list[Comparison]) -> None:
    """Two summands have one order, so gradients of two ranks are equal bit by bit; a split product rounds."""
    for spec, verdict in EQUAL:
        of = found(verdicts, spec)
        assert (of.verdict, of.failure, of.n_steps) == (verdict, None, 2)
        assert of.n_gradients == len(of.gradients) > 20 and of.candidate.step_peak_bytes


@pytest.mark.slow
def test_real_ranks_hold_what_was_predicted(verdicts: list[Comparison]) -> None:
    """To the byte, with equal collectives. The whole matrix, under torchrun, is `python -m benchmarks.ranks`."""
    for spec in (*(spec for spec, _ in EQUAL), COPIES):
        real, predicted = found(verdicts, spec).candidate, predict_ranks(spec).by_rank[0]
        assert real.peaks.tracker_peak_bytes == predicted.step_peak_bytes
        assert calls_of(real) == calls_of(predicted) and len(real.collectives) > 2


@pytest.mark.slow
def test_what_the_allocator_sees_beyond_the_tensors_is_explained(verdicts: list[Comparison]) -> None:
    """A state of the generator and a number for each checkpoint alive; on the mesh a copy of gloo's and two numbers.

    The copy, 100,736 bytes, is made at another moment than the tensors' peak.
    """
    for (spec, _), n_bytes in zip(EQUAL, (5_056 + 8, 2 * (5_056 + 8), 2_176 + 2 * 8)):
        real = found(verdicts, spec).candidate
        assert real.step_peak_bytes and real.peaks.tracker_peak_bytes
        assert real.step_peak_bytes - real.peaks.tracker_peak_bytes == n_bytes


@pytest.mark.slow
def test_gradients_that_are_never_summed_or_lost_are_named(verdicts: list[Comparison]) -> None:
    alone, lost = found(verdicts, ALONE), found(verdicts, LOST)
    assert alone.verdict == "different" and alone.n_bitwise_equal == 0
    assert lost.verdict == "different"
    assert [one.name for one in lost.gradients if one.presence == "baseline only"] == ["down.weight", "down.bias"]
    assert any("down.weight" in cause for cause in lost.causes)


@pytest.mark.slow
def test_both_steps_of_a_comparison_are_measured_and_no_run_is_reported_as_a_comparison() -> None:
    spec, told = COPIES, list[Progress]()
    of = compare_ranks(spec, told.append)
    assert of.verdict == "bitwise equal" and told and not any(progress.part for progress in told)
    assert of.candidate.spec == replace(spec, n_repeats=0) and of.baseline.spec.ranks is None
    assert of.candidate.step_peak_bytes and of.baseline.step_peak_bytes
