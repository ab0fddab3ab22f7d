"""Hazards of a policy or a plan on a model, before any run: for `check` and the badges of the graph.

The rules of reentrant checkpointing stand here. Its forward runs under no_grad, and its backward calls backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from explorer.plan.hazards.checkpoint_rules import POLICY_RULES, Case, Rule
from explorer.plan.hazards.pipeline_rules import PIPELINE_RULES
from explorer.plan.names import some
from explorer.record.graph import Hazard, ModelGraph
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan, RunSpec

_OTHER_VARIANT = "Set use_reentrant to False."


def no_gradient_enters(case: Case) -> Iterator[Hazard]:
    frozen = case.spec.frozen if case.spec else ()
    first = [named[0] for _, named in case.units if named]
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


def nested_outputs(case: Case) -> Iterator[Hazard]:
    blocks = case.handing_on("nested_outputs")
    if blocks:
        yield Hazard(
            rule="reentrant-nested-outputs", severity="error", blocks=blocks,
            sentence=f"The output of {some(blocks)} is a dict or a nested structure: reentrant checkpointing does "
            "not see the tensors inside, so no gradient flows through them.",
            remedy=_OTHER_VARIANT,
        )  # fmt: skip


def nested_inputs(case: Case) -> Iterator[Hazard]:
    blocks = case.handed("nested_inputs")
    if blocks:
        yield Hazard(
            rule="reentrant-nested-inputs", severity="error", blocks=blocks,
            sentence=f"{some(blocks)} is handed tensors inside a tuple, list or dictionary: reentrant checkpointing "
            "does not see them, so its backward runs on into what made them, which raises or is wrong.",
            remedy=f"{_OTHER_VARIANT} Or hand the tensors over as arguments of their own.",
        )  # fmt: skip


def keyword_arguments(case: Case) -> Iterator[Hazard]:
    blocks = case.handed("keyword_inputs")
    if blocks:
        yield Hazard(
            rule="reentrant-keywords", severity="note", blocks=blocks,
            sentence=f"{some(blocks)} is called with keyword arguments, which torch's reentrant checkpointing refuses: "
            "here and in exported files they are handed over by position.",
            remedy="In code of your own do the same, or set use_reentrant to False.",
        )  # fmt: skip


def shared_blocks(case: Case) -> Iterator[Hazard]:
    """Each region calls backward separately, so gradients that accumulate once now accumulate region by region."""
    shared = tuple(b.fqn for b in case.rerun if b.shares_parameters_with or (b.n_calls > 1 and b.own_parameters))
    if shared:
        yield Hazard(
            rule="reentrant-shared", severity="warning", blocks=shared,
            sentence=f"Parameters of {some(shared)} are used more than once: gradient hooks, an optimizer inside "
            "backward and DistributedDataParallel see several partial gradients instead of one.",
            remedy=f"{_OTHER_VARIANT} DistributedDataParallel also takes static_graph=True.",
        )  # fmt: skip


def second_order(case: Case) -> Iterator[Hazard]:
    top = tuple(fqn for fqn in case.policy.blocks if fqn in case.graph.by_fqn)
    if top:
        yield Hazard(
            rule="reentrant-second-order", severity="warning", blocks=top,
            sentence="Reentrant checkpointing refuses torch.autograd.grad, backward(inputs=...) and gradient "
            "penalties; where only some blocks are recomputed, Hessian-vector products are silently wrong.",
            remedy=_OTHER_VARIANT,
        )  # fmt: skip


def warm_autocast(case: Case) -> Iterator[Hazard]:
    if case.spec is not None and case.spec.autocast != "none" and case.rerun:
        yield Hazard(
            rule="reentrant-autocast", severity="note", blocks=case.policy.blocks,
            sentence="Under autocast a forward without gradients may take other kernels and weight casts than the "
            "recompute: expect rounding, not bitwise equality.",
            remedy=_OTHER_VARIANT,
        )  # fmt: skip


REENTRANT_RULES: tuple[Rule, ...] = (
    no_gradient_enters, nested_outputs, nested_inputs, keyword_arguments, shared_blocks, second_order, warm_autocast,
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
    rules = POLICY_RULES
    if policy.use_reentrant and policy.units:
        rules += REENTRANT_RULES
    if plan is not None:
        rules += PIPELINE_RULES
    fired = [hazard for rule in rules for hazard in rule(case)]
    return tuple(sorted(fired, key=lambda hazard: _ORDER.index(hazard.severity)))
