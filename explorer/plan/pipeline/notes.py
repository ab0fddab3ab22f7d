"""Notes that a reader of a pipelined run needs to read its figures correctly."""

from __future__ import annotations

from explorer.plan.pipeline.actions import parse_rows
from explorer.plan.pipeline.stage_costs import left_out
from explorer.plan.pipeline.transfers import links
from explorer.record.pipeline_run import PipelineRun, PlayedSchedule
from explorer.record.run import PipelineEngine

WHERE: dict[PipelineEngine, str] = {
    "inproc": "All ranks ran in one process, in turns: times are composed from each action's own.",
    "replay": "Each rank ran alone, fed with recorded boundary tensors: nobody contended for the machine.",
    "procs": "Ranks ran at once on this machine: with more ranks than cores, their times measure contention.",
    "torchrun": "Ranks ran at once where torchrun started them: step and gaps are wall time, links included.",
}


def notes(run: PipelineRun) -> tuple[str, ...]:
    """Notes that a reader needs to read the figures correctly."""
    sentences = [WHERE[run.engine]]
    if run.wall is not None and run.composed is not None:
        sentences.append(_links_said(run.wall, run.composed))
    tied = [shares.name for shares in run.gradients if len(shares.stages) > 1]
    if tied:
        sentences.append(
            f"{', '.join(tied)} is used by several stages: their gradients are summed, in another order than unsplit, "
            "so the last bits may differ."
        )
    worst = max(run.blocks, key=lambda block: block.multiplier, default=None)
    if worst is not None and worst.multiplier > 2:
        sentences.append(
            f"{worst.fqn} ran {worst.multiplier:g} times for each forward call: a schedule that splits the backward "
            "runs a non-reentrant checkpoint again for every group of parameters."
        )
    plan = run.spec.plan
    if plan is not None and run.predicted is not None and (missing := left_out(plan, run.spec.policy)):
        sentences.append(missing)
    if plan is not None and (stages := out_of_order(run.rows)):
        sentences.append(
            f"{plan.schedule_name} runs the backwards of stage {', '.join(map(str, stages))} in another order of "
            "microbatches than the unsplit model: sums differ in their last bits, which float64 judges as rounding."
        )
    if far := sum(shares.microbatching.verdict == "different" for shares in run.gradients):
        sentences.append(
            f"Microbatching alone moved {far} gradients by more than rounding: dropout draws a mask and BatchNorm "
            "takes a mean for each microbatch. That is not the split's doing: the split is compared with the whole "
            "model on the same microbatches."
        )
    if run.spec.n_accumulation > 1:
        sentences.append(
            f"Accumulation over {run.spec.n_accumulation} batches was left out: a pipelined step accumulates over its "
            "microbatches."
        )
    if plan is not None and not plan.keyed_rng:
        sentences.append("Random numbers were not keyed by block and microbatch: dropout depends on the split.")
    return tuple(sentences)


def _links_said(wall: PlayedSchedule, composed: PlayedSchedule) -> str:
    waits = links(wall)
    worst = f", most of them from stage {waits[0].source} to {waits[0].target}" if waits else ""
    return (
        f"The step took {wall.makespan_ms:.1f} ms by the ranks' own clocks; with links that cost nothing its actions "
        f"would take {composed.makespan_ms:.1f} ms. Ranks waited {sum(link.wait_ms for link in waits):.1f} ms in all "
        f"for transfers{worst}."
    )


def out_of_order(rows: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    """Stages that add up their microbatches' gradients in another order than first to last."""
    orders: dict[int, list[int]] = {}
    for row in parse_rows(rows):
        for action in row:
            if action.kind in "BW":
                orders.setdefault(action.stage, []).append(action.microbatch)
    return tuple(stage for stage, order in sorted(orders.items()) if order != sorted(order))
