"""`plan = explorer.auto_policy(model, step, budget="8GiB")`: the cheapest policy under which a user's step fits.

    step, ended after its forward   the block graph
    a warm-up, a recorded step      memory with everything kept; if too much, the ladder until a policy fits
    timed steps                     the cost of running a block again
    -> plan
    a warm-up, a recorded step      memory under the plan; over the budget: a new plan for the budget less the excess;
                                    a segment that the model refuses: a new plan without the segment
    steps in turns                  the real cost of the plan

Demand: https://github.com/pytorch/pytorch/issues/32219
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from explorer.engine.bench.user_step import UserSteps
from explorer.engine.policy.several_models import Models, one_model
from explorer.errors import InvalidPolicy, OutOfMemory
from explorer.own_loop.record_step import place_of_caller
from explorer.plan.budget_text import DEVICE, check_budget, parse_budget
from explorer.plan.card.cards import capacity_bytes, listed_card
from explorer.record.card import Card
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement, ratio_with_spread
from explorer.record.plan import PCIE_4, AutoPlan, Missed
from explorer.record.policy import KEEP_ALL, Policy

if TYPE_CHECKING:
    from explorer.plan.planners.planner import Planner


def auto_policy(
    model: Models,
    step: Callable[[], object],
    budget: str | int | Card = DEVICE,
    *,
    offload: bool = False,
    host_bandwidth: float = PCIE_4,
) -> AutoPlan:
    """The cheapest policy under which `step()` (forward, loss, backward; an optimizer or none) holds at most `budget`.

    `budget`: bytes, `8GiB`, `60%` of the peak with everything kept, or `device` for the device's free memory. The
    budget covers Python's tensors on the device, the model included. A card (`h100`, or a Card of any size) bounds what
    its allocator would reserve for the recorded step, see `AutoPlan.card`. About eighteen real steps run, see
    `n_steps`. State that the step can reach is restored bit by bit: parameters, gradients, buffers, optimizer state,
    generators, counters. Iterators are not restored, so the step must use the same batch at each call. Apply the policy
    afterwards by `explorer.apply_policy(model, plan.policy)`.

    With `offload`, blocks may also wait on the host, at `host_bandwidth` bytes a second. On a CPU a stand-in for the
    host takes their tensors in the steps that are measured here, and in no later step.

    Several models are given by name, `{"netG": netG, "netD": netD}`, to this function and to apply_policy.

    If the real step exceeds the budget, the plan is still returned. Its text then begins with a warning, and
    `plan.require()` raises.

    Raises BadInput, with the least reachable memory and its parts, if no policy reaches the budget. Raises BadInput
    also for a step that cannot be repeated or has no backward, and for a model with a policy. Raises OutOfMemory if no
    policy fits.
    """
    from explorer.plan.card.step_on_card import memory_on
    from explorer.plan.planners.confirm import confirmed, within_budget
    from explorer.plan.planners.front import undominated

    card = _card_of(budget)
    with UserSteps(one_model(model), step, place_of_caller(), notes_saved=offload) as steps:
        graph = steps.graph()
        run, refused = _first_that_fits(steps, graph)
        planner = _planner(run, graph, host_bandwidth, offload=offload)
        limit = capacity_bytes(card) if card is not None else budget
        assert not isinstance(limit, Card)
        wish = parse_budget(limit, planner.keep_all_bytes, run)

        def recorded(policy: Policy) -> Measurement:
            run = _planned_run(steps, policy, refused)
            return run if card is None else replace(run, card=memory_on(card, run))

        last = confirmed(planner, lambda planner: planner.fulfil(wish), recorded)
        plan, told = last.tries[-1]
        times = None if refused else steps.in_turns((KEEP_ALL, plan.policy))
        ratio = ratio_with_spread(times[1].step, times[0].step) if times else None
    return AutoPlan(
        plan=plan,
        measured_peak_bytes=told.step_peak_bytes,
        n_steps=steps.n_steps,
        measured_time_ratio=ratio[0] if ratio else None,
        time_spread=ratio[1] if ratio else None,
        front=undominated(tuple(last.planner.front())),
        missed=tuple(
            Missed(plan=plan, measured_peak_bytes=run.step_peak_bytes)
            for plan, run in last.tries
            if not within_budget(plan, run)
        ),
        refused=tuple(refused),
        refused_segments=last.refused,
        card=told.card,
    )


def _planner(run: Measurement, graph: ModelGraph, host_bandwidth: float, *, offload: bool) -> Planner:
    """A planner of the run; with `offload` it may move blocks to the host, at `host_bandwidth` bytes a second."""
    from explorer.plan.planners.planner import Planner

    planner = Planner(run, graph)
    if offload:
        planner = planner.with_offload(host_bandwidth)
    return planner


def _planned_run(steps: UserSteps, policy: Policy, refused: list[str]) -> Measurement:
    """The run under a plan's policy. Raises OutOfMemory if it does not fit; `refused` are policies tried before."""
    run = steps.recorded(policy)
    if run is None:
        before = f"{', '.join(refused) or 'keeping all'} was tried before"
        sentence = f"The step does not fit on this device under the plan for it ({before})."
        raise OutOfMemory(sentence, hint="Give a lower budget.")
    return run


def _card_of(budget: str | int | Card) -> Card | None:
    """The card that is the budget; None: the budget is bytes or text. Raises BadInput for a text that is neither."""
    if not isinstance(budget, str):
        return budget if isinstance(budget, Card) else None
    card = listed_card(budget)
    if card is None:
        check_budget(budget)
    return card


def _first_that_fits(steps: UserSteps, graph: ModelGraph) -> tuple[Measurement, list[str]]:
    """The timed run with everything kept, or of the ladder's first rung that fits; and the names of refused rungs."""
    from explorer.plan.policy.presets import ladder

    refused: list[str] = []
    rungs = [(f"{name} recomputed", policy) for name, policy in ladder(graph)]
    for name, policy in [("everything kept", KEEP_ALL), *rungs]:
        try:
            run = steps.recorded(policy)
        except InvalidPolicy as error:  # a rung with a segment that the model refuses; later rungs have no segments
            if not error.neighbours:
                raise
            continue
        if run is not None:
            return (run if policy.units else steps.timed(run)), refused
        refused.append(name)
    raise OutOfMemory(
        "The step does not fit on this device, however much of it is recomputed.",
        hint="Take a smaller batch, or split it into microbatches.",
    )
