"""Plays every lever on a step, and judges it by real steps of both programs on this machine.

    as it is ─▶ each lever, played without data ─▶ sets of levers, recompute planned inside ─▶ real steps, compared
                plan/levers.py                     plan/planners                               judgement.py

No figure of a lever is computed by a formula. compare.py judges policies of one RunSpec; here all else may differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from msgspec.structs import replace
from torch import nn
from torch.utils._pytree import tree_map

from explorer.engine.bench.measure import measure_without_data
from explorer.engine.bench.step import Trainee, forward_backward, ignore, optimizer_step, trainee_of
from explorer.engine.compare.judgement import judge_programs
from explorer.engine.compare.step_program import Step, step_programs
from explorer.engine.device.device import device_of
from explorer.engine.device.memory_limit import available_bytes
from explorer.engine.device.without_data import without_data
from explorer.engine.model.adapters import parts_of
from explorer.engine.model.describe import describe
from explorer.engine.model.equal_models import same_parameters
from explorer.engine.model.load import load_for, takes_argument
from explorer.engine.model.loaded import types_of
from explorer.engine.model.loss_chunks import logits_of
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state
from explorer.errors import BadInput, Cancelled, ExplorerError, TimedOut, message_of
from explorer.plan import lever_text, levers
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.catalogue import default_size, sizes_of
from explorer.plan.names import listed
from explorer.plan.planners.confirm import confirmed, within_bytes
from explorer.plan.planners.planner import Planner
from explorer.plan.sizes import mib
from explorer.plan.why.gradients import causes
from explorer.record.base import to_msgpack
from explorer.record.comparison import Comparison
from explorer.record.fit import Effect, Fit, Judgement, LeftOut, LeverRow, PlayedStep
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan, Progress, Report, silent
from explorer.record.policy import Policy
from explorer.record.run import RunSpec

MOST_FLOPS = 5e9
"""FLOPs of a step that is judged: some dozen such steps take seconds on one CPU core."""
COPIES = 8
"""Peaks of a step for which memory must be free before it is judged: two models, their snapshots, and float64."""
MOST_SETS = 12
"""Sets of levers that are played."""
FEW = {"batch": 2, "length": 32}
"""Arguments of a batch that can be judged."""
EFFECTS: dict[str, Effect] = {"bitwise equal": "bitwise", "rounding": "rounding", "not comparable": "not judged"}
BY_HALVES = "Each half is computed alone: the model draws random numbers, or its loss is no mean over samples."
NO_SIZE = "No size of the model can be run here in a few seconds."


def fit(spec: RunSpec, budget_bytes: int | None = None, report: Report = silent) -> Fit:
    """The levers on the step of `spec`: single levers, and combinations that fit where the step does not.

    The limit is the lowest of the budget and the card; without both, the memory of this machine. Raises BadInput for a
    step that is no usual training step of one process, and what loading and playing the model raise.
    """
    _refuse_other_steps(spec)
    player = Player(spec, budget_bytes, report)
    rows, left_out = player.singles()
    small = None if not rows else player.small()
    judge = Judge(small, report)
    if player.as_is.fits:
        rows = [row for row in rows if player.saves(row)]
    rows = [judge.judged(row) for row in rows]
    combined = [] if player.as_is.fits else player.combined(rows)
    combined = [row for row in combined if len(row.levers) > 1]
    offered = levers.undominated([judge.judged(row) for row in combined], player.as_is)
    return Fit(
        as_is=player.as_is,
        budget_bytes=budget_bytes,
        batch=player.run.batch,
        rows=levers.ranked(filter(player.saves, rows), player.as_is),
        combinations=levers.ranked(offered, player.as_is),
        left_out=tuple(left_out),
        logits=player.parts.last and f"{player.parts.last}, called in {player.parts.logits_text}",
        judged_on=small,
        warnings=player.run.warnings,
    )


def _refuse_other_steps(spec: RunSpec) -> None:
    if spec.ranks is not None or spec.plan is not None or spec.forward_only or spec.policy.units:
        raise BadInput(
            "Levers are played on a whole training step of one process that keeps everything.",
            hint="Leave ranks, stages, forward-only and the policy out.",
        )


class Player:
    """Steps without data of one spec under its levers."""

    def __init__(self, spec: RunSpec, budget_bytes: int | None, report: Report) -> None:
        self._report = report
        self._runs: dict[bytes, Measurement] = {}
        self._timelines: dict[bytes, Measurement] = {}
        """Runs by their step without settings of the allocator, which leave the timeline as it is."""
        self.run = self._played(spec)
        self.limit_bytes = levers.limit_of(self.run, spec.card, budget_bytes)
        self.spec, self.as_is = spec, self._step(self.run)
        self.parts, _ = _outline(spec)

    def _played(self, spec: RunSpec) -> Measurement:
        key, card = to_msgpack(spec), spec.card
        if key in self._runs:
            return self._runs[key]
        step = to_msgpack(spec if card is None else replace(spec, card=replace(card, options="")))
        run = self._timelines.get(step)
        if run is None or card is None:
            run = measure_without_data(spec, self._report)
        else:
            run = replace(run, spec=spec, card=memory_on(card, run, others=()))
        self._runs[key] = self._timelines[step] = run
        return run

    def _step(self, run: Measurement) -> PlayedStep:
        return levers.played_step(run, self.limit_bytes)

    def _say(self, what: str) -> None:
        self._report(Progress(what=what, done=0, total=0))

    def singles(self) -> tuple[list[LeverRow], list[LeftOut]]:
        """A row for each lever that could be played, and which of them are not offered alone, with the reason."""
        rows, left_out = [], []
        for lever, spec in levers.levers_for(self.spec, self.parts):
            self._say(f"playing {lever.title}")
            try:
                rows.append(LeverRow(levers=(lever.key,), step=self._step(self._played(spec))))
            except (Cancelled, TimedOut):
                raise
            except ExplorerError as error:
                left_out.append(LeftOut(lever=lever.title, reason=error.sentence))
        if not self.parts.last:
            left_out.append(LeftOut(lever=levers.BY_KEY["chunks"].title, reason=self.parts.logits_text))
        try:
            rows.append(LeverRow(levers=(levers.RECOMPUTE,), step=self._step(self._recomputed(self.run))))
        except (Cancelled, TimedOut):
            raise
        except ExplorerError as error:
            left_out.append(LeftOut(lever="recompute by the planner", reason=error.sentence))
        return rows, [*left_out, *(self._saves_nothing(row) for row in rows if not self.saves(row))]

    def saves(self, row: LeverRow) -> bool:
        """Whether the step under the row needs less memory."""
        return row.step.needed_bytes < self.as_is.needed_bytes

    def _saves_nothing(self, row: LeverRow) -> LeftOut:
        less = self.as_is.step_peak_bytes - row.step.step_peak_bytes
        reason = "It saves nothing here."
        if less > 0:
            reason = f"Tensors take {mib(less)} less at the peak, and the allocator reserves no less."
        return LeftOut(lever=lever_text.title(row), reason=reason)

    def _recomputed(self, run: Measurement) -> Measurement:
        """A step like `run` under the cheapest policy within the limit; the least peak if none is, or if `run` is."""
        spec = run.spec
        self._say("looking for the cheapest policy")
        with preserve_global_state(), without_data():
            graph = describe(spec.model, seed=spec.seed, conditions=spec.conditions)
        fits = within_bytes(run, self.limit_bytes)
        planner = Planner(run, graph, nested=not fits)  # segments in segments multiply the price of what already fits

        def solve(planner: Planner) -> Plan:
            return planner.floor() if fits else planner.within(self.limit_bytes)

        def play(policy: Policy) -> Measurement:
            return self._played(replace(spec, policy=policy))

        try:
            return confirmed(planner, solve, play, self._say).tries[-1][1]
        except BadInput:  # no policy fits
            return confirmed(planner, Planner.floor, play, self._say).tries[-1][1]

    def small(self) -> RunSpec | None:
        """The step to judge: a size of the model that this machine runs in seconds; None without such a size."""
        form = "foreach" if self.spec.card and self.spec.optimizer_form == "default" else self.spec.optimizer_form
        here = replace(self.spec, card=None, holds_output=self.spec.output_is_held, optimizer_form=form, n_repeats=0)
        if _runs_here(self.as_is):
            return here
        self._say("looking for a size of the model that can be judged")
        for model in _smaller(self.spec.model):
            spec = replace(here, model=model)
            try:
                run = self._played(spec)
            except (Cancelled, TimedOut):
                raise
            except ExplorerError:
                continue
            if _runs_here(self._step(run)):
                return spec
        return None

    def combined(self, rows: Sequence[LeverRow]) -> list[LeverRow]:
        """Rows of sets of levers that fit, recompute included; no set that holds a set that fits without recompute."""
        effects = {row.levers[0]: row.judgement.effect for row in rows}
        fitting: list[LeverRow] = []
        enough: list[set[str]] = []
        for chosen in levers.combinations(rows, self.as_is)[:MOST_SETS]:
            keys = tuple(row.levers[0] for row in chosen)
            if any(smaller <= set(keys) for smaller in enough):
                continue
            self._say(f"playing {' + '.join(keys) or 'the step'} with recompute")
            try:
                row = self._with_recompute(keys)
            except (Cancelled, TimedOut):
                raise
            except ExplorerError:
                continue
            if row.step.fits:
                worst = max((effects.get(key, "not judged") for key in row.levers), key=levers.EFFECTS.index)
                fitting.append(replace(row, judgement=Judgement(effect=worst)))
                enough += [] if levers.RECOMPUTE in row.levers else [set(keys)]
        return list(levers.undominated(fitting, self.as_is))

    def _with_recompute(self, keys: tuple[str, ...]) -> LeverRow:
        """The step under `keys`, and under the cheapest policy too if it would not fit without one."""
        run = self._played(levers.under(self.spec, keys, self.parts))
        if not within_bytes(run, self.limit_bytes):
            run, keys = self._recomputed(run), (*keys, levers.RECOMPUTE)
        return LeverRow(levers=keys, step=self._step(run))


def _outline(spec: RunSpec) -> tuple[levers.Parts, dict[str, str]]:
    """What levers change of the model of `spec`, and the class of each module."""
    with preserve_global_state(), without_data():
        loaded = load_for(spec)
        last, text = logits_of(loaded)
    kinds = {name: type(module).__name__ for name, module in loaded.model.named_modules()}
    parts = parts_of(loaded.model, has_attention=takes_argument(spec.model, levers.ATTENTION))
    return parts._replace(last=last, logits_text=text), kinds


def _runs_here(step: PlayedStep) -> bool:
    free_bytes = available_bytes()
    has_room = free_bytes is None or COPIES * step.step_peak_bytes < free_bytes
    return has_room and step.total_flops is not None and step.total_flops <= MOST_FLOPS


def _smaller(model: ModelRef) -> Iterator[ModelRef]:
    """The model at its default size, then with a small batch, then with few layers of a Hugging Face configuration."""
    sizes = sizes_of(model.target)
    default = replace(model, size=default_size(sizes), arguments={})
    if model.size != default.size or model.arguments:
        yield replace(default, arguments=_attention_of(model))
    few = {name: n for name, n in FEW.items() if takes_argument(model, name)}
    yield replace(default, arguments={**_attention_of(model), **few})
    if model.target.startswith("hf:"):
        yield replace(model, arguments={**model.arguments, **few})
        yield replace(model, arguments={**model.arguments, **few, "num_hidden_layers": 2})


def _attention_of(model: ModelRef) -> dict[str, object]:
    return {name: value for name, value in model.arguments.items() if name == levers.ATTENTION}


class Judge:
    """Real steps of a small spec as it is, and under levers."""

    def __init__(self, small: RunSpec | None, report: Report) -> None:
        self._small, self._report = small, report
        self._parts, self._kinds = (levers.Parts(), {}) if small is None else _outline(small)

    def judged(self, row: LeverRow) -> LeverRow:
        """`row` with what comparing real steps found; why nothing was judged where they cannot run."""
        if self._small is None:
            return replace(row, judgement=Judgement(reason=NO_SIZE))
        self._report(Progress(what=f"judging {lever_text.title(row)}", done=0, total=0))
        try:
            return replace(row, judgement=self._judgement(self._small, row))
        except (Cancelled, TimedOut):
            raise
        except Exception as error:  # a user's model may raise anything in another type or form
            return replace(row, judgement=Judgement(reason=f"The small step failed: {message_of(error)}."))

    def _judgement(self, small: RunSpec, row: LeverRow) -> Judgement:
        policy, note = row.step.spec.policy, ""
        if levers.RECOMPUTE in row.levers:
            units = tuple(unit for unit in policy.units if self._kinds.keys() >= set(unit.blocks))
            if len(units) < len(policy.units):
                note = f"The judged model has {len(units)} of the {len(policy.units)} units that are recomputed."
            policy = replace(policy, units=units)
            if not units:
                return Judgement(reason=note)
        changed = levers.under(small, row.levers, self._parts, policy)
        if changed == small and row.levers == (levers.SEGMENTS,):
            return Judgement(effect="bitwise", reason="The program stays as it is; only addresses change.")
        if changed == small:
            return Judgement(reason="The judged model has nothing that the lever changes.")
        comparison = compare_specs(small, changed)
        worst = comparison.worst
        return Judgement(
            effect=EFFECTS.get(comparison.verdict, "different"),
            distance=None if worst is None else worst.relative_norm,
            reason=" ".join(filter(None, (self._reason(comparison, changed), note))),
        )

    def _reason(self, comparison: Comparison, changed: RunSpec) -> str:
        """Why the steps differ or are not comparable. Causes of a comparison ask for faults that no lever has."""
        small = comparison.baseline.spec
        if comparison.failure is not None:
            return comparison.failure.sentence
        if comparison.verdict in ("bitwise equal", "rounding", "not comparable"):
            return comparison.not_reproducible_because
        if changed.lora is not None or changed.frozen != small.frozen:
            return "Other parameters are trained."
        if changed.dtype != small.dtype:
            return f"Parameters are rounded to {changed.dtype} before the first step."
        if comparison.optimizer_settings:
            name, before, after = comparison.optimizer_settings[0]
            return f"The optimizer makes another step of the gradients: {name} is {after} instead of {before}."
        if changed.autocast != small.autocast:
            return f"Products are made in {changed.autocast}, which rounds more."
        if changed.n_accumulation != small.n_accumulation:
            kinds = dict.fromkeys(kind for kind in self._kinds.values() if "Dropout" in kind or "BatchNorm" in kind)
            return f"Each half is computed alone, and the model has {listed([*kinds])}." if kinds else BY_HALVES
        return next(iter(comparison.causes), "")


class _Program:
    """A trainee as a program of `explorer.judge`."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self.batch = trainee.inputs, trainee.targets

    def step(self, model: nn.Module, batch: object) -> torch.Tensor:
        """One step of the trainee on `batch`, in the types of the trainee or in float64; its loss."""
        trainee = self._trainee
        trainee.inputs, trainee.targets = tree_map(_in_type_of, batch, self.batch)
        loss = forward_backward(trainee)
        optimizer_step(trainee, ignore)
        return torch.tensor(loss)


def _in_type_of(leaf: object, like: object) -> object:
    if not isinstance(leaf, torch.Tensor) or not isinstance(like, torch.Tensor) or leaf.dtype == torch.float64:
        return leaf
    return leaf.to(like.dtype)


def compare_specs(baseline: RunSpec, candidate: RunSpec) -> Comparison:
    """Real steps of two specs whose models begin with equal parameters, compared tensor by tensor.

    Raises BadInput if the parameters differ, and the errors of the baseline.
    """
    specs = baseline, candidate
    with preserve_global_state(), deterministic_kernels(), warnings.catch_warnings(action="ignore"):
        loaded = [load_for(spec) for spec in specs]
        names = same_parameters(*(each.model for each in loaded))
        trainees = [trainee_of(spec, each) for spec, each in zip(specs, loaded)]
        runs = [_run_without_readings(trainee) for trainee in trainees]
        programs = [_Program(trainee) for trainee in trainees]
        sides: list[tuple[Step, nn.Module]] = [(each.step, trainee.model) for each, trainee in zip(programs, trainees)]
        with step_programs(sides, programs[0].batch, names) as (first, second):
            comparison = judge_programs(Comparison(baseline=runs[0], candidate=runs[1]), first, second)
        for trainee in trainees:
            trainee.handle.undo()
    return replace(comparison, causes=causes(comparison))


def _run_without_readings(trainee: Trainee) -> Measurement:
    environment = device_of(trainee.device).environment(trainee.spec.n_threads)
    return Measurement(spec=trainee.spec, environment=environment, dtype=types_of(trainee.model))
