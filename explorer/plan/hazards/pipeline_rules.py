"""Traps of a pipeline plan: what splitting a batch into microbatches and a model into stages can change."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.plan.hazards.checkpoint_rules import Case, Rule
from explorer.plan.names import innermost, is_within, lineage, some
from explorer.plan.pipeline.schedules import SCHEDULES, sizes_of, unmet
from explorer.record.graph import Block, Hazard
from explorer.record.run import PipelinePlan


def indivisible_batch(case: Case) -> Iterator[Hazard]:
    plan = _plan(case)
    n_samples = case.graph.input_shapes[0][0] if case.graph.input_shapes and case.graph.input_shapes[0] else None
    if n_samples is not None and (plan.n_microbatches < 1 or n_samples % plan.n_microbatches):
        yield Hazard(
            rule="indivisible-batch", severity="error", blocks=(),
            sentence=f"A batch of {n_samples} samples has no {plan.n_microbatches} equal microbatches; parts of "
            "unequal size, averaged, weigh samples unequally.",
            remedy="Choose a number of microbatches that divides the batch.",
        )  # fmt: skip


def unmet_conditions(case: Case) -> Iterator[Hazard]:
    """Conditions of the schedule that the numbers of the plan do not meet."""
    plan = _plan(case)
    for rule, sentence, remedy in () if plan.actions else unmet(plan.schedule, sizes_of(plan)):
        yield Hazard(rule=rule, severity="error", blocks=(), sentence=sentence, remedy=remedy)


def refused_cut(case: Case) -> Iterator[Hazard]:
    for cut in case.graph.cuts:
        sides = (case.stage_of.get(cut.after), case.stage_of.get(cut.before))
        if cut.refusal and None not in sides and sides[0] != sides[1]:
            yield Hazard(
                rule="refused-cut", severity="error", blocks=(cut.after, cut.before),
                sentence=f"The plan cuts between {cut.after} and {cut.before}: {cut.refusal}",
                remedy="Move the cut to a place that the graph offers.",
            )  # fmt: skip


def shared_across_a_cut(case: Case) -> Iterator[Hazard]:
    """Shared parameters on two stages are two copies, each with a part of the gradient (torchtitan 1524)."""
    stage = case.stage_of

    def split(block: Block) -> bool:
        of_block = stage.get(block.fqn)
        return of_block is not None and any(
            stage.get(other, of_block) != of_block for other in block.shares_parameters_with
        )

    blocks = innermost(block.fqn for block in case.graph.blocks if split(block))
    if blocks:
        yield Hazard(
            rule="shared-across-a-cut", severity="warning", blocks=blocks,
            sentence=f"Parameters of {some(blocks)} are shared across a cut: each stage holds a copy with a part of "
            "the gradient, and torch.distributed.pipelining does not add them up.",
            remedy="Keep both on one stage, or add the parts after backward, as the explorer's engines do.",
        )  # fmt: skip


def statistics_per_microbatch(case: Case) -> Iterator[Hazard]:
    plan = _plan(case)
    blocks = innermost(b.fqn for b in case.graph.blocks if b.running_statistics and b.fqn in case.stage_of)
    if not blocks or plan.n_microbatches < 2 or not case.trains:
        return
    moved = "once a batch" if plan.deferred_batch_norm else f"{plan.n_microbatches} times a batch"
    yield Hazard(
        rule="statistics-per-microbatch", severity="warning", blocks=blocks,
        sentence=f"Each microbatch is normalised by its own mean and variance in {some(blocks)}, so gradients differ "
        f"from those of the whole batch; running statistics move {moved}.",
        remedy="Compare with the microbatched baseline; deferred_batch_norm mends the running statistics, a norm "
        "without batch statistics (GroupNorm, LayerNorm) mends both.",
    )  # fmt: skip


def masks_by_order(case: Case) -> Iterator[Hazard]:
    plan = _plan(case)
    blocks = innermost(block.fqn for block in case.graph.blocks if block.uses_rng and block.fqn in case.stage_of)
    if blocks and not plan.keyed_rng and case.trains:
        yield Hazard(
            rule="masks-by-order", severity="warning", blocks=blocks,
            sentence=f"keyed_rng is off: random numbers of {some(blocks)} are drawn in the order in which the schedule "
            "runs, so masks differ from those of the unsplit model.",
            remedy="Switch keyed_rng on.",
        )  # fmt: skip


def reentrant_stage(case: Case) -> Iterator[Hazard]:
    plan = _plan(case)
    if not case.policy.use_reentrant or not case.rerun:
        return
    split = _splits_backward(plan)
    yield Hazard(
        rule="reentrant-stage", severity="error" if split else "warning", blocks=case.policy.blocks,
        sentence=f"Reentrant checkpointing fails under {plan.schedule_name}, which asks for input gradients apart."
        if split
        else "Reentrant checkpointing inside a stage fails where a runtime asks for gradients of chosen inputs.",
        remedy="Set use_reentrant to False.",
    )  # fmt: skip


def multiplied_recompute(case: Case) -> Iterator[Hazard]:
    plan = _plan(case)
    if _splits_backward(plan) and case.rerun and plan.checkpoint != "never":
        yield Hazard(
            rule="multiplied-recompute", severity="warning", blocks=case.policy.blocks,
            sentence=f"{plan.schedule_name} splits backward, and each part runs the block again: several recomputes a "
            "microbatch, and some ranks may hold more than with everything kept.",
            remedy="Use 1F1B or Interleaved1F1B with recompute, or keep the blocks.",
        )  # fmt: skip


def lost_gradients(case: Case) -> Iterator[Hazard]:
    """Nothing before the stage trains, so what it receives needs no gradient; torch then has nothing for I to return,
    and W finds no group of parameters."""
    if not _splits_backward(_plan(case)) or _trains_outside(case):
        return
    names = [[fqn for fqn, stage in case.stage_of.items() if stage == j] for j in range(len(_plan(case).stages))]
    behind = [j for j in range(1, len(names)) if not any(_trains(case, fqn) for before in names[:j] for fqn in before)]
    blocks = innermost(fqn for j in behind for fqn in names[j] if _trains(case, fqn))
    if blocks:
        yield Hazard(
            rule="lost-gradients", severity="error", blocks=blocks,
            sentence=f"Nothing before {some(blocks)} trains. A schedule that splits backward then gives these blocks "
            "no gradient at all: torch takes weight gradients from the way to the stage's input.",
            remedy="Use 1F1B or Interleaved1F1B, or put the frozen blocks and the first that trains into one stage.",
        )  # fmt: skip


def saved_ops_split(case: Case) -> Iterator[Hazard]:
    plan = _plan(case)
    blocks = tuple(fqn for unit in case.policy.units if unit.action == "save_ops" for fqn in unit.blocks)
    if blocks and _splits_backward(plan) and plan.checkpoint != "never":
        yield Hazard(
            rule="saved-ops-split", severity="error", blocks=blocks,
            sentence=f"{some(blocks)} keep results of operators (save_ops), which torch hands out once; "
            f"{plan.schedule_name} goes backward through the block several times and raises.",
            remedy="Recompute these blocks whole, or use 1F1B or Interleaved1F1B.",
        )  # fmt: skip


def idle_ranks(case: Case) -> Iterator[Hazard]:
    idle = [str(rank) for rank, row in enumerate(_plan(case).actions) if not row]
    if idle:
        yield Hazard(
            rule="idle-rank", severity="warning", blocks=(),
            sentence=f"The own schedule gives rank {', '.join(idle)} nothing to do.",
            remedy="Leave empty lines out, or give each rank a stage.",
        )  # fmt: skip


def cache_between_microbatches(case: Case) -> Iterator[Hazard]:
    blocks = tuple(b.fqn for b in case.graph.blocks if "keeps_cache" in b.traits and b.fqn in case.stage_of)
    if blocks:
        yield Hazard(
            rule="cache-between-microbatches", severity="error", blocks=blocks,
            sentence=f"A key/value cache passes through {some(blocks)}: the next microbatch would attend to this one.",
            remedy="Train with use_cache=False.",
        )  # fmt: skip


def nothing_recomputed(case: Case) -> Iterator[Hazard]:
    plan = _plan(case)
    if plan.checkpoint == "never" and case.rerun:
        yield Hazard(
            rule="nothing-recomputed", severity="note", blocks=case.policy.blocks,
            sentence="The plan checkpoints no microbatch (never): the policy has no effect.",
            remedy="Choose always or except_last.",
        )  # fmt: skip
    if plan.checkpoint == "except_last" and plan.n_microbatches == 1 and case.rerun:
        yield Hazard(
            rule="nothing-recomputed", severity="note", blocks=case.policy.blocks,
            sentence="The only microbatch is the last one, which except_last keeps: the policy has no effect.",
            remedy="Choose always, or more microbatches.",
        )  # fmt: skip


def _splits_backward(plan: PipelinePlan) -> bool:
    if plan.actions:
        return any("I" in action for row in plan.actions for action in row)
    return plan.schedule in SCHEDULES and SCHEDULES[plan.schedule].splits_backward


def _trains_outside(case: Case) -> bool:
    """True if a parameter of the model, or of a container of the blocks, trains: it may run before any block."""
    frozen = case.spec.frozen if case.spec is not None else ()
    holders = {above for fqn in case.stage_of for above in list(lineage(fqn))[1:]} | {""}
    parameters = [name for block in case.graph.blocks if block.fqn in holders for name in block.own_parameters]
    return any(not any(is_within(name, top) for top in frozen) for name in parameters)


def _trains(case: Case, fqn: str) -> bool:
    frozen = case.spec.frozen if case.spec is not None else ()
    return case.graph.by_fqn[fqn].parameter_bytes > 0 and not any(is_within(fqn, top) for top in frozen)


def _plan(case: Case) -> PipelinePlan:
    assert case.plan is not None, "pipeline rules are asked about a plan"
    return case.plan


PIPELINE_RULES: tuple[Rule, ...] = (
    indivisible_batch, unmet_conditions, refused_cut, shared_across_a_cut, statistics_per_microbatch,
    masks_by_order, reentrant_stage, multiplied_recompute, cache_between_microbatches, nothing_recomputed,
    lost_gradients, saved_ops_split, idle_ranks,
)  # fmt: skip
