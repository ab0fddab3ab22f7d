"""Plays every lever on a step, and has it judged by real steps of both programs on this machine.

    as it is ─▶ each lever, played without data ─▶ sets of levers, recompute planned inside ─▶ real steps, compared
                plan/levers.py                     plan/planners                               fit_judge.py

No figure of a lever is computed by a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

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
    answer = _Answer(player, report)
    answer.report_rows()
    for played in player.singles():
        answer.add(played)
    if player.as_is.fits:
        answer.rows = [row for row in answer.rows if player.saves(row)]
    answer.judged_on = player.small() if answer.rows else None
    judge = Judge(answer.judged_on, report)
    answer.judge(answer.rows, judge)
    if not player.as_is.fits:
        for row in player.combined(answer.rows):
            answer.add_combination(row)
        answer.judge(answer.best_combinations(), judge)
        answer.combinations = list(levers.undominated(answer.combinations, player.as_is))
    return answer.fit()


def _refuse_other_steps(spec: RunSpec) -> None:
    if spec.ranks is not None or spec.plan is not None or spec.forward_only or spec.policy.units:
        raise BadInput(
            "Levers are played on a whole training step of one process that keeps everything.",
            hint="Leave ranks, stages, forward-only and the policy out.",
        )


class _Answer:
    """The answer as far as it is complete. Each new row is reported with the rows before it."""

    def __init__(self, player: Player, report: Report) -> None:
        self._player, self._report = player, report
        self._n_to_play = 1 + len(list(levers.levers_for(player.spec, player.parts)))
        self._n_judged = 0
        self._fitting: list[LeverRow] = []
        """Recompute alone, and combinations with the worst effect of their levers."""
        self.rows: list[LeverRow] = []
        self.combinations: list[LeverRow] = []
        self.left_out: list[LeftOut] = []
        self.judged_on: RunSpec | None = None
        if not player.parts.last:
            self.left_out.append(LeftOut(lever=levers.BY_KEY["chunks"].title, reason=player.parts.logits_text))

    def add(self, played: LeverRow | LeftOut) -> None:
        """Adds a single lever, or why it is not offered."""
        self._n_to_play -= 1
        if isinstance(played, LeftOut):
            self.left_out.append(played)
        else:
            self.rows.append(played)
            if not self._player.saves(played):
                self.left_out.append(self._player.saves_nothing(played))
        self.report_rows()

    def judge(self, rows: list[LeverRow], judge: Judge) -> None:
        """Replaces each of `rows` with the judged row."""
        for i, row in enumerate(rows):
            rows[i] = judge.judged(row)
            self._n_judged += 1
            self.report_rows()

    def add_combination(self, row: LeverRow) -> None:
        """Adds a set of levers that fits, with the worst effect of its levers until the set is judged."""
        self._fitting.append(row)
        self.combinations.append(replace(row, judgement=Judgement()))
        self.report_rows()

    def best_combinations(self) -> list[LeverRow]:
        """Keeps the combinations that no row beats, recompute included."""
        alone = [row for row in self.rows if row.levers == (levers.RECOMPUTE,) and row.step.fits]
        best = levers.undominated([*alone, *self._fitting], self._player.as_is)
        self.combinations = [replace(row, judgement=Judgement()) for row in best if len(row.levers) > 1]
        return self.combinations

    def report_rows(self) -> None:
        """Reports the answer as a part, which names what it lacks if the fit ends here."""
        part = replace(self.fit(), missing=self._missing())
        self._report(Progress(what="playing levers", done=0, total=0, part=to_msgpack(part)))

    def _missing(self) -> str:
        lacks = []
        if self._n_to_play:
            lacks.append(f"levers not played: {self._n_to_play}")
        n_rows = len(self.rows) + len(self.combinations)
        if self._n_judged < n_rows:
            lacks.append(f"rows not judged: {n_rows - self._n_judged}")
        if not self._player.as_is.fits:
            lacks.append("combinations not all tried")
        return f"The fit was cut off ({', '.join(lacks)})." if lacks else ""

    def fit(self) -> Fit:
        """The rows so far, ranked."""
        player = self._player
        return Fit(
            as_is=player.as_is,
            budget_bytes=player.budget_bytes,
            batch=player.run.batch,
            rows=levers.ranked(filter(player.saves, self.rows), player.as_is),
            combinations=levers.ranked(self.combinations, player.as_is),
            left_out=tuple(self.left_out),
            logits=player.parts.last and f"{player.parts.last}, called in {player.parts.logits_text}",
            judged_on=self.judged_on,
            warnings=player.run.warnings,
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

    def singles(self) -> Iterator[LeverRow | LeftOut]:
        """A row for each lever that changes the step, recompute last; why a lever cannot be played."""
        for lever, spec in levers.levers_for(self.spec, self.parts):
            self._say(f"playing {lever.title}")
            yield self._row_of(lever.key, lever.title, partial(self._played, spec))
        yield self._row_of(levers.RECOMPUTE, "recompute by the planner", partial(self._recomputed, self.run))

    def _row_of(self, key: str, title: str, play: Callable[[], Measurement]) -> LeverRow | LeftOut:
        try:
            return LeverRow(levers=(key,), step=self._step(play()))
        except (Cancelled, TimedOut):
            raise
        except ExplorerError as error:
            return LeftOut(lever=title, reason=error.sentence)

    def saves(self, row: LeverRow) -> bool:
        """Whether the step under the row needs less memory, or fits where the step as it is does not.

        On a full card the allocator returns cached blocks, so a setting may fit there and reserve more without end.
        """
        return row.step.needed_bytes < self.as_is.needed_bytes or row.step.fits > self.as_is.fits

    def saves_nothing(self, row: LeverRow) -> LeftOut:
        """Why a row that does not save is not offered alone."""
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

    def combined(self, rows: Sequence[LeverRow]) -> Iterator[LeverRow]:
        """Rows of sets of levers that fit; no set that holds a set that fits without recompute."""
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
                row = replace(row, judgement=Judgement(effect=worst))
                fitting.append(row)
                yield row
                enough += [] if levers.RECOMPUTE in row.levers else [set(keys)]

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
