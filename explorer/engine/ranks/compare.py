"""Verdict of a sharded step on real ranks against the unsharded one, tensor by tensor.

Each rank of the data-parallel mesh has a batch of its own, from the seed after that of the rank before it. A batch that
all ranks shared would hide a gradient that is never summed.

    reference   the unsharded model without a policy takes every batch in turn, each from the same buffers and random
                numbers, and sums the gradients divided by the number of batches; then its optimizer steps
    candidate   the policy, then the split; one batch a rank; its optimizer steps

Both are judged on every rank as `judge` does, DTensors as whole tensors. Buffers and generators are the rank's own.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, distributed, nn

from explorer.engine.bench.measure import measure
from explorer.engine.bench.step import Trainee, autocast, trainee_of
from explorer.engine.compare.judgement import judge_programs
from explorer.engine.compare.step_program import Step, step_programs
from explorer.engine.device.device import device_of
from explorer.engine.model.conditions import torch_dtype
from explorer.engine.model.equal_models import plain_buffers, same_parameters
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import call, move_to
from explorer.engine.ranks.real import measure_rank, run_on_ranks
from explorer.engine.ranks.split import mesh_of, split_model
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.state.rng import RngState
from explorer.plan.why.gradients import causes
from explorer.record.comparison import Comparison, Verdict
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.plan import Progress, Report, silent
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec

BADNESS: tuple[Verdict, ...] = ("bitwise equal", "rounding", "state moved", "different", "not comparable")


def compare_ranks(candidate: RunSpec, report: Report = silent) -> Comparison:
    """The unsharded step and that of the fullest rank of `candidate`, with the worst verdict of all ranks.

    Nothing is timed. Raises as `run_on_ranks`.
    """
    ranks = candidate.ranks
    assert ranks is not None
    judged = run_on_ranks(judge_rank, replace(candidate, n_repeats=0), Comparison, report)
    runs = RecordedRanks(
        ranks=tuple(comparison.candidate for comparison in judged), n_ranks=ranks.n_ranks, recorded_in=""
    )
    if ranks.data == "ddp":  # copies rank 0's buffers to all others
        judged = [judged[0], *(other for other in judged[1:] if other.verdict in ("different", "not comparable"))]
    worst = max(judged, key=lambda comparison: BADNESS.index(comparison.verdict))
    if worst.failure is not None:
        return worst

    def without_part(progress: Progress) -> None:
        report(replace(progress, part=b""))  # the run is no part of a comparison

    return replace(worst, baseline=measure(unsharded(candidate), without_part), candidate=runs.fullest)


def unsharded(spec: RunSpec) -> RunSpec:
    """The step of one process that keeps everything."""
    return replace(spec, policy=KEEP_ALL, ranks=None, n_repeats=0)


def judge_rank(spec: RunSpec) -> Comparison:
    """The comparison on this rank of the present process group, with the candidate's measured step."""
    ranks = spec.ranks
    assert ranks is not None
    rank, n_ranks = distributed.get_rank(), distributed.get_world_size()
    where = device_of(torch.device("cpu")).environment(spec.n_threads)
    runs = [Measurement(spec=side, environment=where, rank=rank, n_ranks=n_ranks) for side in (unsharded(spec), spec)]
    with preserve_global_state():
        torch.set_num_threads(spec.n_threads)
        mesh = mesh_of(ranks, spec.device)
        batches = [_batch(replace(spec, seed=spec.seed + i)) for i in range(ranks.n_data)]
        plain = trainee_of(unsharded(spec), load_for(spec))
        sharded = trainee_of(spec, load_for(spec), lambda model: split_model(model, ranks, mesh))
        group = rank // ranks.n_tensor
        whole = sharded.whole or sharded.model
        sides = (_in_turn(plain, group), plain.model), (_of_rank(sharded, group), whole)
        names = same_parameters(plain.model, whole)
        with step_programs(sides, batches, names) as (reference, candidate):
            comparison = judge_programs(Comparison(baseline=runs[0], candidate=runs[1]), reference, candidate)
    if ranks.n_data > 1:  # the reference calls its model once for each batch
        comparison = replace(comparison, forward=None)
    if comparison.failure is None:
        comparison = replace(comparison, candidate=measure_rank(spec))
    return replace(comparison, causes=causes(comparison))


def _batch(spec: RunSpec) -> tuple[object, object]:
    """Inputs and targets, in the type of the step."""
    loaded = move_to(load_for(spec), "cpu", torch_dtype(spec))
    return loaded.inputs, loaded.targets


def _loss(trainee: Trainee, model: nn.Module, batch: tuple[object, object]) -> Tensor:
    inputs, targets = batch
    with autocast(trainee):
        return trainee.loss_function(call(model, inputs), targets)


def _in_turn(trainee: Trainee, group: int) -> Step:
    """The step of the reference. Buffers and generators are left as after batch number `group`."""

    def step(model: nn.Module, batches: Any) -> None:
        model.zero_grad(set_to_none=True)
        before, after = _State(model), None
        for i, batch in enumerate(batches):
            before.restore()
            (_loss(trainee, model, batch) / len(batches)).backward()
            if i == group:
                after = _State(model)
        if after is not None:
            after.restore()
        if trainee.optimizer is not None:
            trainee.optimizer.step()

    return step


def _of_rank(trainee: Trainee, group: int) -> Step:
    def step(model: nn.Module, batches: Any) -> None:
        model.zero_grad(set_to_none=True)
        _loss(trainee, model, batches[group]).backward()
        if trainee.optimizer is not None:
            trainee.optimizer.step()

    return step


class _State:
    """Buffers and generators at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._rng = RngState.capture(model)
        self._buffers = [(buffer, buffer.clone()) for buffer in plain_buffers(model).values()]

    def restore(self) -> None:
        self._rng.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
