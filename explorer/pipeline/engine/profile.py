"""The price list for every prediction: each stretch between two legal cuts, measured as a separate stage.

The finest split runs two microbatches one by one, once with everything kept and once with everything recomputed. Sums
of stretches predict stages, and the clock simulates a step from stages.

A stage pays part of an action's time once, whatever its number of stretches. A stage of several stretches, equal ones
if possible, is compared with their sum to find this part.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from itertools import groupby

from msgspec.structs import astuple, replace
from torch import nn

from explorer.engine.bench.measure import Meter
from explorer.engine.bench.step import host_of, split
from explorer.engine.device.device import device_of
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded, blaming
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, InvalidPlan
from explorer.pipeline.engine.build import Pipeline, build
from explorer.pipeline.engine.microbatches import n_rows_of
from explorer.pipeline.engine.stage_bench import N_MICROBATCHES, StageBench, Survey, survey
from explorer.pipeline.plan.cuts import Stages, special_units
from explorer.pipeline.record.step import ActionCost, BlockCost, PipelineProfile, StageOverhead
from explorer.record.plan import Report, silent
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelinePlan, RunSpec

ROUNDS = ("pricing blocks, kept", "pricing blocks, recomputed", "pricing blocks, as chosen")
"""Texts of the progress: everything kept, everything recomputed, and the policy's other actions."""
N_TIMED = 3
"""Timed passes. Each pass runs two forwards of a stretch and one backward that adds to existing gradients."""
N_SURVEY = 2
N_BENCH = 1 + N_TIMED
N_MEMORY = 1
"""Numbers of passes: of the survey, of each bench, and with memory recorded."""
MOST_IN_ONE = 4
"""Most equal stretches in one stage."""


def profile_blocks(
    spec: RunSpec, groups: Stages, report: Report = silent, *, n_microbatches: int = 8
) -> PipelineProfile:
    """Costs of each of `groups` (plan.cuts.atoms) for a microbatch of 1/`n_microbatches` of the batch.

    Only units of the policy that save operators or offload matter; the plan of `spec` is not used. Raises InvalidPlan
    for cuts that the model does not allow, ModelFailed for a model that raises, and the errors of load and prepare.
    """
    with preserve_global_state(), host_of(spec.policy):
        loaded = load_for(spec)
        small, n_rows, batch_rows = _cut_batch(loaded, n_microbatches)
        plan = PipelinePlan(stages=groups, n_microbatches=N_MICROBATCHES, schedule="GPipe")
        fine = replace(spec, plan=plan, policy=KEEP_ALL)
        units = special_units(spec.policy, plan)
        meter = Meter(report, N_SURVEY + 2 * (2 * N_BENCH + N_MEMORY) + bool(units) * (N_BENCH + N_MEMORY))
        pipeline = build(fine, small)
        with blaming(spec.model, small.inputs, "pipeline step"):
            pricing = _Pricing(fine, small, pipeline, groups, meter)
            surveyed = pricing.survey
            keep_all, kept_overhead = pricing.alike(KEEP_ALL, ROUNDS[0])
            again = [fqn for j, group in enumerate(groups) if j not in surveyed.overwriting for fqn in group]
            recomputed, overhead = pricing.alike(Policy.recompute(again), ROUNDS[1])
            chosen = pricing.special(replace(spec.policy, units=units))
        overhead = _mean(kept_overhead, overhead)
        gradients = [_gradient_bytes(module) for module in pipeline.modules]
        sent = [sum(meta.n_bytes for meta in part.metas_out) for part in pipeline.parts]
        last = len(groups) - 1
        return PipelineProfile(
            spec=spec,
            environment=device_of(pipeline.trainee.device).environment(spec.n_threads),
            n_rows=n_rows,
            batch_rows=batch_rows,
            blocks=tuple(
                BlockCost(
                    blocks=group,
                    kept=_without(overhead, keep_all[j]),
                    recomputed=_without(overhead, recomputed[j]),
                    chosen=_without(overhead, chosen[j]) if j in chosen else None,
                    parameter_bytes=stage.parameter_bytes,
                    gradient_bytes=gradients[j],
                    output_bytes=0 if j == last else sent[j],
                    passed_bytes=surveyed.passed[j],
                    returned_bytes=sent[j],
                    loss_bytes=surveyed.loss_bytes if j == last else 0,
                )
                for j, (group, stage) in enumerate(zip(groups, pipeline.stages(), strict=True))
            ),
            overhead=overhead,
        )


def _cut_batch(loaded: Loaded, n_microbatches: int) -> tuple[Loaded, int, int]:
    """A batch of two microbatches, the rows of one microbatch, and the rows of the whole batch."""
    batch_rows = n_rows_of(loaded.inputs)
    if batch_rows < 2:
        raise InvalidPlan(
            f"The batch has {batch_rows} rows: it cannot be cut into microbatches.", hint="Take a larger batch."
        )
    most = max(1, min(n_microbatches, batch_rows) // N_MICROBATCHES)
    n_parts = max(n for n in range(1, most + 1) if batch_rows % (n * N_MICROBATCHES) == 0 or n == 1)
    try:
        inputs, targets = split(loaded.inputs, loaded.targets, n_parts)[0]
    except BadInput as error:
        raise InvalidPlan(error.sentence, hint=error.hint) from error
    small = Loaded(loaded.ref, loaded.model, inputs, targets, loaded.loss_function)
    return small, batch_rows // n_parts // N_MICROBATCHES, batch_rows


class _Pricing:
    """The model in its finest cut, surveyed, ready for pricing under several policies."""

    def __init__(self, spec: RunSpec, loaded: Loaded, keep_all: Pipeline, groups: Stages, meter: Meter) -> None:
        self._spec, self._loaded, self._keep_all, self._groups, self._meter = spec, loaded, keep_all, groups, meter
        self._begin_pass = partial(meter, ROUNDS[0])
        self.survey = survey(keep_all, self._begin_pass)

    def alike(self, policy: Policy, what: str) -> tuple[list[ActionCost], StageOverhead]:
        """The cost of every stretch, overhead included, under a policy that treats all stretches alike; and the
        overhead."""
        kinds = self.survey.kinds
        self._name_round(what, kinds)
        fine = self._bench(policy, self._groups, self.survey, self.survey.samples(kinds))
        span = _longest_run(kinds)
        long = self._as_one_stage(policy, span) if len(span) > 1 else None
        for _ in range(N_TIMED):  # alternating, so that a slow moment of the machine meets both
            for bench in (fine, long):
                if bench is not None:
                    bench.time()
        costs = fine.costs()
        forward, backward = (_joint_ms(fine, long, span, kind) for kind in "FB")
        overhead = StageOverhead(forward_ms=forward, backward_ms=backward)
        return [costs[kind] for kind in kinds], overhead

    def special(self, policy: Policy) -> dict[int, ActionCost]:
        """Costs of the stretches whose policy saves operators or offloads. Stretches of one kind have equal units."""
        actions = {unit.blocks[0]: (unit.action, unit.save_ops) for unit in policy.units}
        if not actions:
            return {}
        first_of_kind: dict[Hashable, int] = {}
        pairs = zip(self.survey.kinds, self._groups, strict=True)
        keys = ((kind, *map(actions.get, group)) for kind, group in pairs)
        kinds = tuple(first_of_kind.setdefault(key, j) for j, key in enumerate(keys))
        stretches = [j for j, group in enumerate(self._groups) if actions.keys() & set(group)]
        surveyed = dataclasses.replace(self.survey, kinds=kinds)
        samples = surveyed.samples(kinds[j] for j in stretches)
        self._name_round(ROUNDS[2], kinds)
        bench = self._bench(policy, self._groups, surveyed, samples)
        for _ in range(N_TIMED):
            bench.time()
        costs = bench.costs()
        return {j: costs[kinds[j]] for j in stretches}

    def _name_round(self, what: str, kinds: Sequence[int]) -> None:
        n_kinds = len(set(kinds))
        label = what if n_kinds == len(kinds) else f"{what}: {n_kinds} kinds of {len(kinds)}"
        self._begin_pass = partial(self._meter, label)

    def _bench(self, policy: Policy, stages: Stages, surveyed: Survey, samples: Collection[int]) -> StageBench:
        pipeline = self._keep_all
        if stages != self._groups or policy.units:
            assert self._spec.plan is not None
            plan = replace(self._spec.plan, stages=stages)
            pipeline = build(replace(self._spec, policy=policy, plan=plan), self._loaded)
        return StageBench(pipeline, surveyed, samples, self._begin_pass)

    def _as_one_stage(self, policy: Policy, span: range) -> StageBench:
        """A bench for the stretches of `span` as one stage, alone, with the tensors at the stage's borders."""
        parts = (self._groups[: span.start], self._groups[span.start : span.stop], self._groups[span.stop :])
        stages = tuple(sum(part, ()) for part in parts if part)
        mail = {
            (1, kind, i): sent
            for (to, kind, i), sent in self.survey.mail.items()
            if (to, kind) in ((span.start, "F"), (span[-1], "B"))
        }
        alone = Survey(mail, tuple(range(len(stages))))
        return self._bench(policy, stages, alone, {1})


def _longest_run(kinds: Sequence[int]) -> range:
    """Stretches to compare with one stage of the same stretches: some equal ones, else all but the first."""
    runs = [list(run) for kind, run in groupby(range(len(kinds)), key=kinds.__getitem__) if kind]
    longest = max(runs, key=len, default=[])
    if len(longest) > 2:
        return range(longest[0], longest[0] + min(len(longest), MOST_IN_ONE))
    return range(1, len(kinds))


def _joint_ms(fine: StageBench, long: StageBench | None, span: range, kind: str) -> float:
    """Milliseconds by which each joint between stretches shortens an action.

    `long` is one stage of the stretches `span` of `fine`. At most half of a stretch's time: readings are noisy.
    """
    if long is None:
        return 0.0
    single = [fine.least_ms(j, kind) for j in span]
    saved = max(sum(single) - long.least_ms(1, kind), 0.0)
    return min(saved / (len(single) - 1), statistics.mean(single) / 2)


def _gradient_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)


def _mean(*overheads: StageOverhead) -> StageOverhead:
    columns = zip(*map(astuple, overheads))
    return StageOverhead(**dict(zip(StageOverhead.__struct_fields__, map(statistics.mean, columns))))


def _without(overhead: StageOverhead, cost: ActionCost) -> ActionCost:
    return replace(
        cost,
        forward_ms=max(cost.forward_ms - overhead.forward_ms, 0.0),
        backward_ms=max(cost.backward_ms - overhead.backward_ms, 0.0),
    )
