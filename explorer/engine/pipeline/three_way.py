"""The source of a gradient difference: four runs from one state, each with one change.

    whole batch ──▶ microbatches ──▶ the same with the policy ──▶ the same in stages
              microbatching      recompute                    splitting

The first three runs use the unsplit model's forward without the tape, so that an error of splitting shows.
If a bit differs, the unsplit model in float64 decides between rounding (tied weights are summed in another order)
and an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from torch import Tensor

from explorer.engine.bench.step import autocast, prepare
from explorer.engine.compare.diffs import Tensors, Yardstick, difference
from explorer.engine.compare.programs import formats_of
from explorer.engine.compare.reference import epsilon_of
from explorer.engine.model.loaded import Loaded, call
from explorer.engine.pipeline.cut.build import Pipeline, microbatches, policy_of
from explorer.engine.pipeline.cut.keyed_rng import KeyedRng
from explorer.engine.pipeline.play.batch_norm import deferred_batch_norm
from explorer.engine.state.bits import same_bits
from explorer.engine.state.rng import seed_everything
from explorer.record.comparison import BufferDiff, GradientDiff
from explorer.record.pipeline_run import BufferShares, GradientShares
from explorer.record.plan import Progress, Report
from explorer.record.policy import KEEP_ALL, Policy


@dataclass(frozen=True)
class Left:
    """Gradients and buffers by full name, on the CPU."""

    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]


def references(pipeline: Pipeline, loaded: Loaded, report: Report) -> tuple[Left, Left, Left]:
    """The three unsplit runs. Errors of the model pass through."""
    plan = pipeline.plan
    runs: list[Left] = []
    for what, n, policy in (
        ("whole batch", 1, KEEP_ALL),
        ("microbatches", plan.n_microbatches, KEEP_ALL),
        ("microbatches with the policy", plan.n_microbatches, policy_of(pipeline.spec)),
    ):
        report(Progress(what=f"unsplit model: {what}", done=len(runs), total=3))
        if len(runs) == 2 and policy == KEEP_ALL:
            runs.append(runs[1])
        else:
            runs.append(unsplit(pipeline, loaded, n, policy))
    return runs[0], runs[1], runs[2]


def unsplit(pipeline: Pipeline, loaded: Loaded, n_microbatches: int, policy: Policy, *, exact: bool = False) -> Left:
    """Gradients (means over microbatches) and buffers of the unsplit model. `exact` computes in float64."""
    spec = pipeline.spec
    if exact:
        spec = msgspec.structs.replace(spec, dtype="float64", autocast="none")
    trainee = prepare(
        msgspec.structs.replace(spec, policy=policy, plan=None, optimizer="none", n_accumulation=1), loaded
    )
    batches = microbatches(trainee, n_microbatches)
    rng = KeyedRng(spec.seed, pipeline.rng.chain, pipeline.plan.keyed_rng)
    model = trainee.model
    model.zero_grad(set_to_none=True)
    seed_everything(spec.seed)
    with (
        deferred_batch_norm(model, enabled=pipeline.plan.deferred_batch_norm),
        rng.listening(model, range(n_microbatches)) as numbers,
    ):
        for i in numbers:
            with autocast(trainee):
                loss = trainee.loss_function(call(model, batches[i][0]), batches[i][1])
            loss.backward()
            del loss
    return Left(
        {
            name: None if parameter.grad is None else parameter.grad.div_(n_microbatches).cpu()
            for name, parameter in model.named_parameters()
        },
        {name: buffer.detach().cpu() for name, buffer in model.named_buffers()},
    )


def gradient_shares(
    pipeline: Pipeline, loaded: Loaded, unsplit_runs: tuple[Left, Left, Left], split_gradients: Tensors
) -> tuple[GradientShares, ...]:
    """A record per parameter, in the model's order."""
    whole, parted, recomputed = (run.gradients for run in unsplit_runs)
    by_microbatching = _yardstick(pipeline, loaded, 1, ((whole, parted),))
    by_the_rest = _yardstick(
        pipeline, loaded, pipeline.n_microbatches, ((parted, recomputed), (recomputed, split_gradients))
    )
    return tuple(
        GradientShares(
            name=name,
            stages=tuple(stage for stage, _ in pipeline.owners[name]),
            microbatching=difference(GradientDiff, name, whole[name], parted[name], by_microbatching),
            recompute=difference(GradientDiff, name, parted[name], recomputed[name], by_the_rest),
            splitting=difference(GradientDiff, name, recomputed[name], split_gradients.get(name), by_the_rest),
        )
        for name in whole
    )


def _yardstick(
    pipeline: Pipeline, loaded: Loaded, n_microbatches: int, pairs: tuple[tuple[Tensors, Tensors], ...]
) -> Yardstick:
    """Yardstick of the unsplit model's float64 gradients; without gradients if all `pairs` agree or float64 fails."""
    epsilon = epsilon_of(pairs[0][0], formats_of(pipeline.spec))
    if all(_same(left[name], right.get(name)) for left, right in pairs for name in left):
        return Yardstick(epsilon=epsilon)
    try:
        exact = unsplit(pipeline, loaded, n_microbatches, KEEP_ALL, exact=True)
    except Exception:  # a type fixed in the model, a kernel without float64: no difference is then called rounding
        return Yardstick(epsilon=epsilon)
    return Yardstick(reference=exact.gradients, epsilon=epsilon)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return same_bits(left, right)


def buffer_shares(
    unsplit_runs: tuple[Left, Left, Left], split_buffers: dict[str, Tensor | None]
) -> tuple[BufferShares, ...]:
    """A record per buffer, in the model's order."""
    whole, parted, recomputed = unsplit_runs
    return tuple(
        BufferShares(
            name=name,
            microbatching=_buffer(name, whole.buffers[name], parted.buffers[name]),
            recompute=_buffer(name, parted.buffers[name], recomputed.buffers[name]),
            splitting=_buffer(name, recomputed.buffers[name], split_buffers.get(name)),
        )
        for name in whole.buffers
    )


def _buffer(name: str, left: Tensor | None, right: Tensor | None) -> BufferDiff:
    return difference(BufferDiff, name, left, right, Yardstick())
