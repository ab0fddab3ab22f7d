"""The price list behind every prediction: each stretch between two legal cuts, run as a stage of its own.

The finest split there is, two microbatches, once with everything kept and once with everything recomputed. From the two
come time, saved bytes and peaks of each stretch; sums of them are stages, and played by the clock a step. Stretches
alone take a little longer than in one piece, so their times are scaled to those of the model as a single stage.
"""

from __future__ import annotations

import statistics

import msgspec
from torch import Tensor
from torch.utils._pytree import tree_leaves

from explorer.engine.device import device_of
from explorer.engine.load import Loaded, load
from explorer.engine.pipeline.build import Pipeline, build
from explorer.engine.pipeline.inproc import Trace, run_pass
from explorer.engine.step import left_as_found, split
from explorer.errors import BadInput, InvalidPlan
from explorer.plan.cuts import Stages
from explorer.record.pipeline import ActionCost, BlockCost, PipelineProfile, RankMemory
from explorer.record.plan import PipelinePlan
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.progress import Progress, Report, silent
from explorer.record.run import RunSpec

N_MICROBATCHES = 2
"""The first backward makes the parameters' gradients, the second adds to them."""
N_TIMED = 3


def profile_blocks(
    spec: RunSpec, groups: Stages, report: Report = silent, *, n_microbatches: int = 8, loaded: Loaded | None = None
) -> PipelineProfile:
    """Costs of each of `groups` (plan.cuts.atoms) for a microbatch of 1/`n_microbatches` of the batch.

    The policy and the plan of `spec` do not matter. Raises InvalidPlan where the model cannot be cut there, and what
    load, prepare and the model raise.
    """
    with left_as_found():
        loaded = loaded or load(spec.model, seed=spec.seed)
        small, n_rows, batch_rows = _cut_batch(loaded, n_microbatches)
        plan = PipelinePlan(stages=groups, n_microbatches=N_MICROBATCHES, schedule="GPipe")
        fine = msgspec.structs.replace(spec, plan=plan)
        report(Progress(what="profiling blocks, kept", done=0, total=2))
        kept, pipeline = _costs(msgspec.structs.replace(fine, policy=KEEP_ALL), small)
        report(Progress(what="profiling blocks, recomputed", done=1, total=2))
        everything = Policy.recompute([fqn for group in groups for fqn in group])
        recomputed, _ = _costs(msgspec.structs.replace(fine, policy=everything), small)
        gradients = [sum(_bytes(p) for p in module.parameters() if p.requires_grad) for module in pipeline.modules]
        return PipelineProfile(
            spec=spec,
            environment=device_of(pipeline.trainee.device).environment(spec.n_threads),
            n_rows=n_rows,
            batch_rows=batch_rows,
            blocks=tuple(
                BlockCost(
                    blocks=group,
                    kept=kept[j],
                    recomputed=recomputed[j],
                    parameter_bytes=stage.parameter_bytes,
                    gradient_bytes=gradients[j],
                    output_bytes=0 if j == len(groups) - 1 else sum(m.n_bytes for m in pipeline.parts[j].metas_out),
                )
                for j, (group, stage) in enumerate(zip(groups, pipeline.stages(), strict=True))
            ),
        )


def _cut_batch(loaded: Loaded, n_microbatches: int) -> tuple[Loaded, int, int]:
    """A batch of two microbatches; rows of one of them, and of the whole batch."""
    tensors = [leaf for leaf in tree_leaves(loaded.inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    batch_rows = tensors[0].shape[0] if tensors else 0
    if batch_rows < 2:
        raise InvalidPlan(
            f"The batch has {batch_rows} rows: it cannot be cut into microbatches.", hint="Take a larger batch."
        )
    wanted = max(1, min(n_microbatches, batch_rows) // N_MICROBATCHES)
    n_parts = max(n for n in range(1, wanted + 1) if batch_rows % (n * N_MICROBATCHES) == 0 or n == 1)
    try:
        inputs, targets = split(loaded.inputs, loaded.targets, n_parts)[0]
    except BadInput as error:
        raise InvalidPlan(error.sentence, hint=error.hint) from error
    return (
        Loaded(loaded.ref, loaded.model, inputs, targets, loaded.loss_function),
        (batch_rows // n_parts // N_MICROBATCHES),
        batch_rows,
    )


def _costs(spec: RunSpec, loaded: Loaded) -> tuple[list[ActionCost], Pipeline]:
    pipeline = build(spec, loaded)
    run_pass(pipeline)
    timed = [run_pass(pipeline) for _ in range(N_TIMED)]
    watched = run_pass(pipeline, memory=True)
    ranks = range(len(pipeline.rows))
    memory = watched.memory(pipeline, tuple(watched.actions), ranks)
    costs = [_cost(stage, timed, memory[stage]) for stage in ranks]
    assert spec.plan is not None
    one_stage = PipelinePlan(stages=(sum(spec.plan.stages, ()),), n_microbatches=N_MICROBATCHES)
    whole = build(msgspec.structs.replace(spec, plan=one_stage), loaded)
    run_pass(whole)
    in_one = [run_pass(whole) for _ in range(N_TIMED)]
    scales = {
        kind: _median(in_one, 0, kind) / max(sum(_median(timed, stage, kind) for stage in ranks), 1e-9) for kind in "FB"
    }
    return [_scaled(cost, scales["F"], scales["B"]) for cost in costs], pipeline


def _median(timed: list[Trace], stage: int, kind: str, what: str = "duration_ms") -> float:
    times = [time for trace in timed for time in trace.actions if time.stage == stage and time.kind == kind]
    return statistics.median(getattr(time, what) for time in times)


def _scaled(cost: ActionCost, forward: float, backward: float) -> ActionCost:
    return msgspec.structs.replace(
        cost,
        forward_ms=cost.forward_ms * forward,
        backward_ms=cost.backward_ms * backward,
        recompute_ms=cost.recompute_ms * backward,
    )


def _cost(stage: int, timed: list[Trace], memory: RankMemory) -> ActionCost:
    forward, first_back, back = (f"{stage}F0", f"{stage}B0", f"{stage}B1")
    entry, high, left = _levels(memory)
    return ActionCost(
        forward_ms=_median(timed, stage, "F"),
        backward_ms=_median(timed, stage, "B"),
        recompute_ms=_median(timed, stage, "B", "recompute_ms"),
        saved_bytes=left[forward] - entry[forward],
        forward_extra_bytes=high[forward] - entry[forward],
        first_backward_extra_bytes=high[first_back] - entry[first_back],
        backward_extra_bytes=high[back] - entry[back],
    )


def _levels(memory: RankMemory) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Held bytes by action: at its entry, at its highest, and at its end."""
    entry: dict[str, int] = dict.fromkeys(memory.actions, 0)
    high, left = dict(entry), dict(entry)
    before, seen = 0, set[str]()
    for held, index in zip(memory.held_bytes, memory.action, strict=True):
        if index >= 0:
            name = memory.actions[index]
            if name not in seen:
                seen.add(name)
                entry[name] = high[name] = before
            high[name], left[name] = max(high[name], held), held
        before = held
    return entry, high, left


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
