"""The block graph of the Pipeline page: cut lines, stage colours, and the same recompute marks as on Explore."""

from __future__ import annotations

import msgspec

from explorer.record.graph import ModelGraph
from explorer.record.pipeline import BlockCost, PipelineProfile
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan
from explorer.ui import block_graph
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.pipeline.state import PipelineState
from explorer.ui.session import window
from explorer.view.drawing.units import mib
from explorer.view.graph.browser import Paint
from explorer.view.graph.geometry import Layout, layout
from explorer.view.graph.labels import Label
from explorer.view.graph.nesting import Node, nest

HEIGHT = 290


def cut_graph(split: PipelineState, graph: ModelGraph, plan: PipelinePlan, profile: PipelineProfile | None) -> None:
    """A click or Enter on a line cuts there; a click or Space on a block recomputes it."""
    marks = pipeline_state.marks_of(split, graph)
    policy = split.draft.spec.policy
    block_graph.block_graph(
        drawing(graph, marks.open, plan.n_microbatches),
        marks,
        Paint(
            labels=labels(graph, policy, plan, profile),
            segments=tuple(unit.blocks for unit in policy.units if len(unit.blocks) > 1),
            height=HEIGHT + window.extra_height(),
            window=window.laid_out_for(),
        ),
        key=pipeline_state.WIDGET,
    )


def drawing(graph: ModelGraph, opened: list[str], n_microbatches: int) -> Layout:
    """The graph with its cut lines; bytes on a line are the bytes of one microbatch."""
    drawn = layout(graph, opened, cuts=True)
    cuts = tuple(
        msgspec.structs.replace(cut, note=f"cut: {mib(cut.n_bytes / n_microbatches)} a microbatch")
        for cut in drawn.cuts
    )
    return msgspec.structs.replace(drawn, cuts=cuts)


def labels(graph: ModelGraph, policy: Policy, plan: PipelinePlan, profile: PipelineProfile | None) -> dict[str, Label]:
    """Labels of the blocks: parameters, stage, and cost of the block alone."""
    stage_of = {fqn: stage for stage, blocks in enumerate(plan.stages) for fqn in blocks}
    costs = {cost.blocks[0]: cost for cost in profile.blocks if len(cost.blocks) == 1} if profile else {}
    on = set(policy.blocks)
    by_fqn = {}
    for node in nest(graph).values():
        if not node.id:
            continue
        stage = _stage(node, stage_of)
        price = _price(costs.get(node.id), recomputed=node.id in on)
        is_in_chain = node.id in stage_of or node.members
        by_fqn[node.id] = Label(
            bytes=f"params {mib(graph.by_fqn[node.id].parameter_bytes)}" if node.id in graph.by_fqn else "",
            note=" · ".join(filter(None, [price, f"stage {stage}" if is_in_chain and stage is not None else ""])),
            title=_title(node, stage, costs.get(node.id)),
            stage=stage,
        )
    return by_fqn


def _price(cost: BlockCost | None, *, recomputed: bool) -> str:
    if cost is None:
        return ""
    action = cost.recomputed if recomputed else cost.kept
    return f"{action.forward_ms + action.backward_ms:.1f} ms"


def _title(node: Node, stage: int | None, cost: BlockCost | None) -> str:
    lines = [f"{node.id.lstrip('×')} ({node.kind})"]
    if stage is not None:
        lines.append(f"on stage {stage}")
    if cost is not None:
        for words, action in (("kept", cost.kept), ("recomputed", cost.recomputed)):
            lines.append(
                f"one microbatch, {words}: forward {action.forward_ms:.2f} ms, backward {action.backward_ms:.2f} ms, "
                f"saves {mib(action.saved_bytes)} (measured)"
            )
    return "\n".join(lines)


def _stage(node: Node, stage_of: dict[str, int]) -> int | None:
    """Stage of a block or of its unit in the chain; None if a run spreads over several stages."""
    if node.members:
        stages = {stage_of.get(member) for member in node.members}
        return stages.pop() if len(stages) == 1 else None
    id = node.id
    while id:
        if id in stage_of:
            return stage_of[id]
        id = id.rpartition(".")[0]
    return None
