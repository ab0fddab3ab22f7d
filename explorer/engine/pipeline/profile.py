"""The price list for every prediction: each stretch between two legal cuts, measured as a separate stage.

The finest split runs two microbatches in turn, once with everything kept and once with everything recomputed. Each run
has its backward whole (B) and in two parts (I, W). The runs give time, saved bytes and peaks of each stretch. Sums of
stretches predict stages, and the clock simulates a step from stages.

Equal stretches are priced once (first_look.py). A stage pays part of an action's time once, whatever its number of
stretches. A stage of several stretches, equal ones if possible, is compared with their sum to find this part.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
from torch import Tensor
from torch.utils._pytree import tree_leaves

from explorer.engine.bench.step import split
from explorer.engine.device.device import device_of
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded, blaming
from explorer.engine.pipeline.cut.build import Pipeline, build
from explorer.engine.pipeline.first_look import N_MICROBATCHES, FirstLook, look_at, n_bytes
from explorer.engine.pipeline.profile_stages import StageBench
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, InvalidPlan
from explorer.plan.pipeline.cuts import Stages
from explorer.plan.pipeline.stage_costs import special_units
from explorer.record.pipeline_cost import ActionCost, BlockCost, PipelineProfile, StageOverhead
from explorer.record.plan import Progress, Report, silent
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelinePlan, RunSpec

TURNS = ("pricing blocks, kept", "pricing blocks, recomputed", "pricing blocks, as chosen")
"""Texts of the progress, by turn."""
N_TIMED = 3
"""Timed passes. Each pass runs two forwards of a stretch and one backward that adds to existing gradients."""
N_LOOKED = 2
N_OF_BENCH = 2 + 2 * N_TIMED
N_WEIGHED = 4
"""Numbers of passes: of the first look, of each bench, and with memory recorded."""
MOST_IN_ONE = 4
"""Most equal stretches in one stage."""


def profile_blocks(
    spec: RunSpec, groups: Stages, report: Report = silent, *, n_microbatches: int = 8, loaded: Loaded | None = None
) -> PipelineProfile:
    """Costs of each of `groups` (plan.cuts.atoms) for a microbatch of 1/`n_microbatches` of the batch.

    Only units of the policy that save operators or offload matter; the plan of `spec` is not used. Raises InvalidPlan
    for cuts that the model does not allow, ModelFailed for a model that raises, and the errors of load and prepare.
    """
    with preserve_global_state():
        loaded = loaded or load_for(spec)
        small, n_rows, batch_rows = _cut_batch(loaded, n_microbatches)
        plan = PipelinePlan(stages=groups, n_microbatches=N_MICROBATCHES, schedule="GPipe")
        fine = msgspec.structs.replace(spec, plan=plan, policy=KEEP_ALL)
        units = special_units(spec.policy, plan)
        ticks = _Ticks(report, N_LOOKED + 2 * (2 * N_OF_BENCH + N_WEIGHED) + bool(units) * (N_OF_BENCH + N_WEIGHED))
        pipeline = build(fine, small)
        with blaming(spec.model, small.inputs, "pipeline step"):
            look = look_at(pipeline, ticks.of(TURNS[0]))
            case = _Case(fine, small, pipeline, look, ticks)
            kept = _priced(case, KEEP_ALL, TURNS[0])
            again = [group for j, group in enumerate(groups) if j not in look.overwriting]
            recomputed = _priced(case, Policy.recompute([fqn for group in again for fqn in group]), TURNS[1])
            chosen = _as_chosen(case, msgspec.structs.replace(spec.policy, units=units), kept.weight_ms_per_block)
        overhead = _mean([kept.overhead, recomputed.overhead])
        gradients = [sum(n_bytes(p) for p in module.parameters() if p.requires_grad) for module in pipeline.modules]
        return PipelineProfile(
            spec=spec,
            environment=device_of(pipeline.trainee.device).environment(spec.n_threads),
            n_rows=n_rows,
            batch_rows=batch_rows,
            blocks=tuple(
                BlockCost(
                    blocks=group,
                    kept=_without(overhead, kept.costs[j]),
                    recomputed=_without(overhead, recomputed.costs[j]),
                    chosen=_without(overhead, chosen[j]) if j in chosen else None,
                    parameter_bytes=stage.parameter_bytes,
                    gradient_bytes=gradients[j],
                    output_bytes=0 if j == len(groups) - 1 else sum(m.n_bytes for m in pipeline.parts[j].metas_out),
                    passed_bytes=look.passed[j],
                    returned_bytes=sum(m.n_bytes for m in pipeline.parts[j].metas_out),
                    loss_bytes=look.loss_bytes if j == len(groups) - 1 else 0,
                )
                for j, (group, stage) in enumerate(zip(groups, pipeline.stages(), strict=True))
            ),
            overhead=overhead,
        )


def _cut_batch(loaded: Loaded, n_microbatches: int) -> tuple[Loaded, int, int]:
    """A batch of two microbatches, the rows of one microbatch, and the rows of the whole batch."""
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


@dataclass
class _Ticks:
    """Progress of all passes of all turns."""

    report: Report
    total: int
    n_done: int = 0

    def of(self, what: str) -> Callable[[], None]:
        """A function to call before every pass."""

        def tick() -> None:
            self.report(Progress(what=what, done=self.n_done, total=self.total))
            self.n_done += 1

        return tick


@dataclass(frozen=True)
class _Case:
    """The model in its finest cut, after the first look, ready for pricing under several policies."""

    spec: RunSpec
    loaded: Loaded
    kept: Pipeline
    look: FirstLook
    ticks: _Ticks

    @property
    def groups(self) -> Stages:
        assert self.spec.plan is not None
        return self.spec.plan.stages

    def pipeline(self, policy: Policy, stages: Stages) -> Pipeline:
        assert self.spec.plan is not None
        if stages == self.groups and not policy.units:
            return self.kept
        plan = msgspec.structs.replace(self.spec.plan, stages=stages)
        return build(msgspec.structs.replace(self.spec, policy=policy, plan=plan), self.loaded)


@dataclass(frozen=True)
class _Priced:
    """Prices under one policy: the cost of each stretch with overhead, and the overhead itself."""

    costs: dict[int, ActionCost]
    overhead: StageOverhead
    weight_ms_per_block: float


def _priced(case: _Case, policy: Policy, what: str) -> _Priced:
    """Prices of every stretch under a policy that treats all stretches alike."""
    look, tick = case.look, case.ticks.of(_with_kinds(what, case.look))
    fine = StageBench(case.pipeline(policy, case.groups), look, look.some_of(look.kinds), tick)
    span = _in_a_row(look.kinds)
    long = _in_one(case, policy, span, tick) if len(span) > 1 else None
    for _ in range(N_TIMED):  # in turns, so that a slow moment of the machine meets both
        for bench in (fine, long):
            if bench is not None:
                bench.time()
    sums = _Sums(fine, long, span)
    costs = fine.costs(sums.weight_ms_per_block())
    return _Priced({j: costs[kind] for j, kind in enumerate(look.kinds)}, sums.overhead(), sums.weight_ms_per_block())


def _as_chosen(case: _Case, policy: Policy, weight_ms_per_block: float) -> dict[int, ActionCost]:
    """Costs of the stretches whose policy saves operators or offloads. Stretches of one kind have equal units."""
    ways = {unit.blocks[0]: (unit.action, unit.save_ops) for unit in policy.units}
    if not ways:
        return {}
    known: dict[Hashable, int] = {}
    kinds = tuple(
        known.setdefault((kind, tuple(ways.get(fqn) for fqn in group)), j)
        for j, (kind, group) in enumerate(zip(case.look.kinds, case.groups, strict=True))
    )
    wanted = [j for j, group in enumerate(case.groups) if ways.keys() & set(group)]
    look = dataclasses.replace(case.look, kinds=kinds)
    stages = look.some_of(kinds[j] for j in wanted)
    bench = StageBench(case.pipeline(policy, case.groups), look, stages, case.ticks.of(_with_kinds(TURNS[2], look)))
    for _ in range(N_TIMED):
        bench.time()
    costs = bench.costs(weight_ms_per_block)
    return {j: costs[kinds[j]] for j in wanted}


def _with_kinds(what: str, look: FirstLook) -> str:
    n_kinds = len(set(look.kinds))
    return what if n_kinds == len(look.kinds) else f"{what}: {n_kinds} kinds of {len(look.kinds)}"


def _in_a_row(kinds: Sequence[int]) -> range:
    """Stretches to compare with one stage of the same stretches: some equal ones, else all but the first."""
    runs = [[j for j, _ in run] for kind, run in groupby(enumerate(kinds), key=lambda one: one[1]) if kind]
    longest = max(runs, key=len, default=[])
    if len(longest) > 2:
        return range(longest[0], longest[0] + min(len(longest), MOST_IN_ONE))
    return range(1, len(kinds))


def _in_one(case: _Case, policy: Policy, span: range, tick: Callable[[], None]) -> StageBench:
    """A bench for the stretches of `span` as one stage, alone, with the tensors at the stage's borders."""
    first, last = case.groups[: span.start], case.groups[span.stop :]
    parts = (first, case.groups[span.start : span.stop], last)
    stages = tuple(sum(part, ()) for part in parts if part)
    mail = {
        (1, kind, i): sent
        for (to, kind, i), sent in case.look.mail.items()
        if (to, kind) in ((span.start, "F"), (span[-1], "B"))
    }
    look = FirstLook(mail, tuple(range(len(stages))))
    return StageBench(case.pipeline(policy, stages), look, {1}, tick)


@dataclass(frozen=True)
class _Sums:
    """Comparison of single stretches with one stage of the same stretches."""

    fine: StageBench
    long: StageBench | None
    span: range

    def overhead(self) -> StageOverhead:
        """Milliseconds by which each joint between stretches shortens an action."""
        return StageOverhead(
            forward_ms=self._joint_ms("F"), backward_ms=self._joint_ms("B"), input_ms=self._joint_ms("I")
        )

    def _joint_ms(self, kind: str) -> float:
        """Milliseconds saved by each joint, at most half of a stretch's time: readings are noisy."""
        if self.long is None or (kind == "I" and (self.fine.split is None or self.long.split is None)):
            return 0.0
        alone = [self.fine.least_ms(j, kind) for j in self.span]
        saved = max(sum(alone) - self.long.least_ms(1, kind), 0.0)
        return min(saved / (len(alone) - 1), statistics.mean(alone) / 2)

    def weight_ms_per_block(self) -> float:
        """Extra milliseconds of a stretch's W for every earlier stretch. The sum grows with the pairs of stretches."""
        if self.long is None or self.fine.split is None or self.long.split is None:
            return 0.0
        alone = [self.fine.ms(j, "W") for j in self.span]
        return max(self.long.ms(1, "W") - sum(alone), 0.0) / (len(alone) * (len(alone) - 1) / 2)


def _mean(overheads: list[StageOverhead]) -> StageOverhead:
    return StageOverhead(
        forward_ms=statistics.mean(one.forward_ms for one in overheads),
        backward_ms=statistics.mean(one.backward_ms for one in overheads),
        input_ms=statistics.mean(one.input_ms for one in overheads),
    )


def _without(overhead: StageOverhead, cost: ActionCost) -> ActionCost:
    split = cost.split
    if split is not None:
        split = msgspec.structs.replace(split, input_ms=max(split.input_ms - overhead.input_ms, 0.0))
    return msgspec.structs.replace(
        cost,
        forward_ms=max(cost.forward_ms - overhead.forward_ms, 0.0),
        backward_ms=max(cost.backward_ms - overhead.backward_ms, 0.0),
        split=split,
    )
