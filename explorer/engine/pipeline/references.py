"""The cause of a gradient difference: four runs from one state, each with one change.

    whole batch ──▶ microbatches ──▶ the same with the policy ──▶ the same in stages
              microbatching      recompute                    splitting

The first three runs use the unsplit model's forward without the tape, so that an error of splitting shows.
If a bit differs, the unsplit model in float64 decides between rounding (tied weights are summed in another order)
and an error.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from msgspec.structs import replace
from torch import Tensor

from explorer.engine.bench.step import autocast, prepare
from explorer.engine.compare.diffs import Tensors, Yardstick, difference
from explorer.engine.compare.programs import formats_of
from explorer.engine.compare.reference import epsilon_of
from explorer.engine.model.loaded import Loaded, call
from explorer.engine.pipeline.build import Pipeline, policy_of
from explorer.engine.pipeline.microbatches import KeyedRng, deferred_batch_norm, microbatches
from explorer.engine.state.bits import same_bits
from explorer.engine.state.rng import seed_everything
from explorer.record.comparison import BufferDiff, GradientDiff
from explorer.record.pipeline import BufferShares, GradientShares, Share
from explorer.record.plan import Progress, Report
from explorer.record.policy import KEEP_ALL, Policy


class StepTensors(NamedTuple):
    """Gradients and buffers after a step, by full name, on the CPU."""

    gradients: Tensors
    buffers: Tensors


def shares(
    pipeline: Pipeline, loaded: Loaded, split: StepTensors, report: Report
) -> tuple[tuple[GradientShares, ...], tuple[BufferShares, ...]]:
    """A record per parameter and per buffer, in the model's order, for the tensors of the `split` run.

    Errors of the unsplit model pass through.
    """
    whole, parted, recomputed = _references(pipeline, loaded, report)
    steps = [(whole, parted), (parted, recomputed), (recomputed, split)]
    gradient_steps = [(left.gradients, right.gradients) for left, right in steps]
    by_microbatching = _yardstick(pipeline, loaded, 1, gradient_steps[:1])
    by_the_rest = _yardstick(pipeline, loaded, pipeline.n_microbatches, gradient_steps[1:])
    yardsticks = (by_microbatching, by_the_rest, by_the_rest)
    gradients = tuple(
        GradientShares(
            name=name,
            stages=tuple(stage for stage, _ in pipeline.owners[name]),
            **_by_cause(GradientDiff, name, gradient_steps, yardsticks),
        )
        for name in whole.gradients
    )
    buffer_steps = [(left.buffers, right.buffers) for left, right in steps]
    exact = (Yardstick(),) * 3
    buffers = tuple(
        BufferShares(name=name, **_by_cause(BufferDiff, name, buffer_steps, exact)) for name in whole.buffers
    )
    return gradients, buffers


def _by_cause(
    kind: type[Any], name: str, steps: list[tuple[Tensors, Tensors]], yardsticks: tuple[Yardstick, ...]
) -> dict[str, Any]:
    return {
        cause: difference(kind, name, left.get(name), right.get(name), yardstick)
        for cause, (left, right), yardstick in zip(get_args(Share), steps, yardsticks, strict=True)
    }


def _references(pipeline: Pipeline, loaded: Loaded, report: Report) -> tuple[StepTensors, StepTensors, StepTensors]:
    """The three unsplit runs."""
    n, policy = pipeline.n_microbatches, policy_of(pipeline.spec)

    def run(number: int, what: str, n_microbatches: int, policy: Policy) -> StepTensors:
        report(Progress(what=f"unsplit model: {what}", done=number, total=3))
        return run_unsplit(pipeline, loaded, n_microbatches, policy)

    whole = run(0, "whole batch", 1, KEEP_ALL)
    parted = run(1, "microbatches", n, KEEP_ALL)
    return whole, parted, parted if policy == KEEP_ALL else run(2, "microbatches with the policy", n, policy)


def run_unsplit(
    pipeline: Pipeline, loaded: Loaded, n_microbatches: int, policy: Policy, *, exact: bool = False
) -> StepTensors:
    """Gradients (means over microbatches) and buffers of the unsplit model. `exact` computes in float64."""
    spec = pipeline.spec
    if exact:
        spec = replace(spec, dtype="float64", autocast="none")
    trainee = prepare(replace(spec, policy=policy, plan=None, optimizer="none", n_accumulation=1), loaded)
    batches = microbatches(trainee, n_microbatches)
    rng = KeyedRng(spec.seed, pipeline.rng.chain, pipeline.plan.keyed_rng)
    model = trainee.model
    model.zero_grad(set_to_none=True)
    seed_everything(spec.seed)
    with (
        deferred_batch_norm(model, enabled=pipeline.plan.deferred_batch_norm),
        rng.seeding(model, range(n_microbatches)) as numbers,
    ):
        for i in numbers:
            with autocast(trainee):
                loss = trainee.loss_function(call(model, batches[i][0]), batches[i][1])
            loss.backward()
            del loss
    return StepTensors(
        {
            name: None if parameter.grad is None else parameter.grad.div_(n_microbatches).cpu()
            for name, parameter in model.named_parameters()
        },
        {name: buffer.detach().cpu() for name, buffer in model.named_buffers()},
    )


def _yardstick(
    pipeline: Pipeline, loaded: Loaded, n_microbatches: int, steps: list[tuple[Tensors, Tensors]]
) -> Yardstick:
    """Yardstick of the unsplit model's float64 gradients; without gradients if all `steps` agree or float64 fails."""
    epsilon = epsilon_of(steps[0][0], formats_of(pipeline.spec))
    if all(_same(left[name], right.get(name)) for left, right in steps for name in left):
        return Yardstick(epsilon=epsilon)
    try:
        exact = run_unsplit(pipeline, loaded, n_microbatches, KEEP_ALL, exact=True)
    except Exception:  # a type fixed in the model, a kernel without float64: no difference is then called rounding
        return Yardstick(epsilon=epsilon)
    return Yardstick(reference=exact.gradients, epsilon=epsilon)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return same_bits(left, right)
