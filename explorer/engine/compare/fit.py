"""Plays every lever on a step, and has it judged by real steps of both programs on this machine.

    as it is ─▶ each lever, played without data ─▶ sets of levers, recompute planned inside ─▶ real steps, compared
                plan/levers.py                     plan/planners                               fit_judge.py

No figure of a lever is computed by a formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from explorer.engine.bench.measure import measure_without_data
from explorer.engine.compare.fit_judge import Judge, outline_of
from explorer.engine.device.memory_limit import available_bytes
from explorer.engine.device.without_data import without_data
from explorer.engine.model.describe import describe
from explorer.engine.model.load import takes_argument
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, Cancelled, ExplorerError, TimedOut
from explorer.plan import lever_text, levers
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.catalogue import default_size, sizes_of
from explorer.plan.planners.confirm import confirmed, within_bytes
from explorer.plan.planners.planner import Planner
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.sizes import mib
from explorer.record.base import to_msgpack
from explorer.record.fit import Fit, Judgement, LeftOut, LeverRow, PlayedStep
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


def fit(spec: RunSpec, budget: str | int | None = None, report: Report = silent) -> Fit:
    """The levers on the step of `spec`: single levers, and combinations that fit where the step does not.

    The limit is the lowest of the budget (`8GiB`, `70%` of the peak, or bytes) and the card; without both, the memory
    of this machine. Raises BadInput for another budget, and for a step that is no usual training step of one process;
    else what loading and playing the model raise.
    """
    _refuse_other_steps(spec)
    player = Player(spec, budget, report)
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
        budget_bytes=player.budget_bytes,
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

    def __init__(self, spec: RunSpec, budget: str | int | None, report: Report) -> None:
        self._report = report
        self._runs: dict[bytes, Measurement] = {}
        self._timelines: dict[bytes, Measurement] = {}
        """Runs by their step without settings of the allocator, which leave the timeline as it is."""
        self.run = self._played(spec)
        self.budget_bytes = levers.budget_bytes_of(budget, self.run, spec.card)
        self.limit_bytes = levers.limit_of(self.run, spec.card, self.budget_bytes)
        self.spec, self.as_is = spec, self._step(self.run)
        self.parts, _ = outline_of(spec)

    def _played(self, spec: RunSpec) -> Measurement:
        key, card = to_msgpack(spec), spec.card
        if key in self._runs:
            return self._runs[key]
        step = to_msgpack(spec if card is None else replace(spec, card=replace(card, options="")))
        run = self._timelines.get(step)
        if run is None or card is None:
            run = measure_without_data(spec, self._report, figures_only=True)
        else:
            run = replace(run, spec=spec, card=memory_on(card, run, others=()))
        self._runs[key] = self._timelines[step] = run
        return run

    def _step(self, run: Measurement) -> PlayedStep:
        step = levers.played_step(run, self.limit_bytes)
        if step.host_peak_bytes is None:
            return step
        return replace(step, moved_bytes=Forecaster(self.run).forecast(run.spec.policy).moved_bytes)

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
        fitting = [row for row in rows if row.levers == (levers.RECOMPUTE,) and row.step.fits]
        enough: list[set[str]] = []
        for chosen in levers.combinations(rows, self.as_is)[:MOST_SETS]:
            keys = tuple(row.levers[0] for row in chosen)
            if any(smaller <= set(keys) for smaller in enough) or levers.is_beaten(chosen, fitting, self.as_is):
                continue
            self._say(f"playing {' + '.join(keys)} with recompute")
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
