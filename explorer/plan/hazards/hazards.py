"""Hazards of a policy or a plan on a model, before any run: for `check` and the badges of the graph.

The rules of reentrant checkpointing are here, whose forward runs under no_grad and whose backward calls backward.
Slices add rules about a plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from explorer import slices
from explorer.plan.hazards.checkpoint_rules import POLICY_RULES, Case, Rule, Trap, handed, handing_on, rerun_units
from explorer.plan.hazards.dry_rerun_rules import DRY_RERUN_RULES
from explorer.plan.names import some
from explorer.record.graph import Hazard, ModelGraph
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan, RunSpec

_OTHER_VARIANT = "Set use_reentrant to False."


def no_gradient_enters(case: Case) -> Iterator[Hazard]:
    first, frozen = [named[0] for _, named in case.units if named], case.frozen
    blind = tuple(block.fqn for block in first if "inputs_need_no_grad" in block.traits)
    if blind:
        yield Hazard(
            rule="reentrant-no-grad-input", severity="error", blocks=blind,
            sentence=f"No input of {some(blind)} requires a gradient: reentrant checkpointing trains nothing in it.",
            remedy=_OTHER_VARIANT,
        )  # fmt: skip
    behind = tuple(block.fqn for block in first if block.fqn not in blind)
    if frozen and behind:
        yield Hazard(
            rule="reentrant-frozen", severity="warning", blocks=behind,
            sentence=f"The run freezes {some(frozen)}. Where nothing before {some(behind)} trains, its inputs "
            "require no gradient and reentrant checkpointing trains nothing in it.",
            remedy=_OTHER_VARIANT,
        )  # fmt: skip


def shared(case: Case) -> tuple[str, ...]:
    """Blocks whose parameters are used more than once: each region adds its part of the gradient separately."""
    return tuple(b.fqn for b in case.rerun if b.shares_parameters_with or (b.n_calls > 1 and b.own_parameters))


REENTRANT_RULES: tuple[Rule, ...] = (
    no_gradient_enters,
    Trap(
        "reentrant-nested-outputs", "error", handing_on("nested_outputs"),
        "The output of {blocks} is a dict or a nested structure: reentrant checkpointing does not see the tensors "
        "inside, so no gradient flows through them.",
        _OTHER_VARIANT,
    ),
    Trap(
        "reentrant-nested-inputs", "error", handed("nested_inputs"),
        "{blocks} is handed tensors inside a tuple, list or dictionary: reentrant checkpointing does not see them, so "
        "its backward runs on into what made them, which raises or is wrong.",
        f"{_OTHER_VARIANT} Or hand the tensors over as arguments of their own.",
    ),
    Trap(
        "reentrant-keywords", "note", handed("keyword_inputs"),
        "{blocks} is called with keyword arguments, which torch's reentrant checkpointing refuses: here and in "
        "exported files they are handed over by position.",
        "In code of your own do the same, or set use_reentrant to False.",
    ),
    Trap(
        "reentrant-shared", "warning", shared,
        "Parameters of {blocks} are used more than once: gradient hooks, an optimizer inside backward and "
        "DistributedDataParallel see several partial gradients instead of one.",
        f"{_OTHER_VARIANT} DistributedDataParallel also takes static_graph=True.",
    ),
    Trap(
        "reentrant-second-order", "warning",
        lambda case: tuple(fqn for fqn in case.policy.blocks if fqn in case.graph.by_fqn),
        "Reentrant checkpointing refuses torch.autograd.grad, backward(inputs=...) and gradient penalties; where only "
        "some blocks are recomputed, Hessian-vector products are silently wrong.",
        _OTHER_VARIANT,
    ),
    Trap(
        "reentrant-autocast", "note", rerun_units,
        "Under autocast a forward without gradients may take other kernels and weight casts than the recompute: "
        "expect rounding, not bitwise equality.",
        _OTHER_VARIANT,
        lambda case: case.spec is not None and case.spec.autocast != "none",
    ),
)  # fmt: skip


_ORDER = ("error", "warning", "note")


def hazards(
    graph: ModelGraph, policy: Policy, plan: PipelinePlan | None = None, spec: RunSpec | None = None
) -> tuple[Hazard, ...]:
    """Every rule that fires, errors first; empty where nothing is known to go wrong.

    `plan` adds the traps of a pipeline (None takes the plan of `spec`), `spec` those of a device, a mode, autocast.
    """
    plan = plan if plan is not None or spec is None else spec.plan
    case = Case(graph, policy, plan, spec)
    rules = POLICY_RULES + DRY_RERUN_RULES
    if policy.use_reentrant and policy.units:
        rules += REENTRANT_RULES
    if plan is not None:
        for part in slices.parts("plan.hazards").values():
            rules += part.PLAN_RULES
    fired = [hazard for rule in rules for hazard in rule(case)]
    return tuple(sorted(fired, key=lambda hazard: _ORDER.index(hazard.severity)))
