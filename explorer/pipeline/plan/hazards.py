"""Traps of a pipeline: what splitting a batch into microbatches and a model into stages can change."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.pipeline.plan.schedules import sizes_of, splits_backward, unmet
from explorer.plan.hazards.checkpoint_rules import Case, Rule, Trap, named_with, rerun_units
from explorer.plan.names import above, innermost, is_within, some
from explorer.record.graph import Hazard
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


def reentrant_stage(case: Case) -> Iterator[Hazard]:
    plan = _plan(case)
    if not case.policy.use_reentrant or not case.rerun:
        return
    split = splits_backward(_plan(case))
    yield Hazard(
        rule="reentrant-stage", severity="error" if split else "warning", blocks=case.policy.blocks,
        sentence=f"Reentrant checkpointing fails under {plan.schedule_name}, which asks for input gradients apart."
        if split
        else "Reentrant checkpointing inside a stage fails where a runtime asks for gradients of chosen inputs.",
        remedy="Set use_reentrant to False.",
    )  # fmt: skip


def idle_ranks(case: Case) -> Iterator[Hazard]:
    idle = [str(rank) for rank, row in enumerate(_plan(case).actions) if not row]
    if idle:
        yield Hazard(
            rule="idle-rank", severity="warning", blocks=(),
            sentence=f"The own schedule gives rank {', '.join(idle)} nothing to do.",
            remedy="Leave empty lines out, or give each rank a stage.",
        )  # fmt: skip


def split_parameters(case: Case) -> tuple[str, ...]:
    """Innermost blocks whose parameters another stage holds too (torchtitan 1524)."""
    shared = []
    for block in case.graph.blocks:
        stages = {case.stage_of.get(fqn) for fqn in (block.fqn, *block.shares_parameters_with)}
        if block.fqn in case.stage_of and len(stages - {None}) > 1:
            shared.append(block.fqn)
    return innermost(shared)


def behind_frozen_stages(case: Case) -> tuple[str, ...]:
    """Innermost blocks that train behind stages that do not: what their stage receives needs no gradient.

    torch then has nothing for I to return, and W finds no group of parameters.
    """
    if _trains_outside(case):
        return ()
    trained = [(fqn, stage) for fqn, stage in case.stage_of.items() if _trains(case, fqn)]
    first = min((stage for _, stage in trained), default=0)
    return innermost(fqn for fqn, stage in trained if 0 < stage == first)


def _trains_outside(case: Case) -> bool:
    """True if a parameter of the model, or of a container of the blocks, trains: it may run before any block."""
    holders = {"", *above(*case.stage_of)}
    parameters = [name for block in case.graph.blocks if block.fqn in holders for name in block.own_parameters]
    return any(not is_within(name, *case.frozen) for name in parameters)


def _trains(case: Case, fqn: str) -> bool:
    return case.graph.by_fqn[fqn].parameter_bytes > 0 and not is_within(fqn, *case.frozen)


def _plan(case: Case) -> PipelinePlan:
    assert case.plan is not None, "pipeline rules are asked about a plan"
    return case.plan


def _recomputes(case: Case) -> bool:
    return _plan(case).checkpoint != "never"


PLAN_RULES: tuple[Rule, ...] = (
    indivisible_batch,
    unmet_conditions,
    refused_cut,
    Trap(
        "shared-across-a-cut", "warning", split_parameters,
        "Parameters of {blocks} are shared across a cut: each stage holds a copy with a part of the gradient, and "
        "torch.distributed.pipelining does not add them up.",
        "Keep both on one stage, or add the parts after backward, as the explorer's engines do.",
    ),
    statistics_per_microbatch,
    Trap(
        "masks-by-order", "warning",
        lambda case: innermost(b.fqn for b in case.graph.blocks if b.uses_rng and b.fqn in case.stage_of),
        "keyed_rng is off: random numbers of {blocks} are drawn in the order in which the schedule runs, so masks "
        "differ from those of the unsplit model.",
        "Switch keyed_rng on.",
        lambda case: case.trains and not _plan(case).keyed_rng,
    ),
    reentrant_stage,
    Trap(
        "multiplied-recompute", "warning", rerun_units,
        "{schedule} splits backward, and each part runs the block again: several recomputes a microbatch, and some "
        "ranks may hold more than with everything kept.",
        "Use 1F1B or Interleaved1F1B with recompute, or keep the blocks.",
        lambda case: splits_backward(_plan(case)) and _recomputes(case),
    ),
    Trap(
        "cache-between-microbatches", "error",
        lambda case: tuple(b.fqn for b in case.graph.blocks if "keeps_cache" in b.traits and b.fqn in case.stage_of),
        "A key/value cache passes through {blocks}: the next microbatch would attend to this one.",
        "Train with use_cache=False.",
    ),
    Trap(
        "nothing-recomputed", "note", rerun_units,
        "The plan checkpoints no microbatch (never): the policy has no effect.",
        "Choose always or except_last.",
        lambda case: not _recomputes(case),
    ),
    Trap(
        "nothing-recomputed", "note", rerun_units,
        "The only microbatch is the last one, which except_last keeps: the policy has no effect.",
        "Choose always, or more microbatches.",
        lambda case: _plan(case).checkpoint == "except_last" and _plan(case).n_microbatches == 1,
    ),
    Trap(
        "lost-gradients", "error", behind_frozen_stages,
        "Nothing before {blocks} trains. A schedule that splits backward then gives these blocks no gradient at all: "
        "torch takes weight gradients from the way to the stage's input.",
        "Use 1F1B or Interleaved1F1B, or put the frozen blocks and the first that trains into one stage.",
        lambda case: splits_backward(_plan(case)),
    ),
    Trap(
        "saved-ops-split", "error", named_with("save_ops"),
        "{blocks} keep results of operators (save_ops), which torch hands out once; {schedule} goes backward through "
        "the block several times and raises.",
        "Recompute these blocks whole, or use 1F1B or Interleaved1F1B.",
        lambda case: splits_backward(_plan(case)) and _recomputes(case),
    ),
    idle_ranks,
)  # fmt: skip
