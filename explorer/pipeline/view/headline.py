"""The strip of the Pipeline page as data: measured if the drawn plan ran, else predicted."""

from __future__ import annotations

from explorer.pipeline.record.step import PipelineRun, PlayedSchedule, RankMemory
from explorer.pipeline.view import text as words
from explorer.record.run import PipelinePlan
from explorer.view.drawing.units import NOT_MEASURED, change, count, mib, percent
from explorer.view.text.explore import Headline


def figures(
    run: PipelineRun | None, forecast: PlayedSchedule | None, plan: PipelinePlan | None, *, before: PipelineRun | None
) -> tuple[Headline, ...]:
    """Always five, so that nothing moves. `run` is that of this plan; `before` an older one, for comparison."""
    measured = run.timing if run is not None else None
    shown = measured or forecast
    predicted = run.predicted if run is not None and measured else None
    old = before.timing if before is not None else None
    numbers = ""
    if plan is not None:
        microbatches = count(plan.n_microbatches, "microbatch", "microbatches")
        numbers = f"{microbatches}, {count(plan.n_ranks or len(plan.stages), 'rank')}"
    return (
        Headline(
            label="Step",
            value=_ms(shown),
            delta=_against(run, shown, predicted) or (f"an earlier plan: {_ms(old)}" if old else _gain(shown)),
            origin=(shown.origin,) if shown else (),
            tooltip=words.WALL if measured is not None and run is not None and run.wall is not None else words.STEP,
        ),
        Headline(
            label="Bubble",
            value=percent(shown.bubble_fraction) if shown else NOT_MEASURED,
            delta=_waits(shown, predicted, old),
            origin=(shown.origin,) if shown else (),
            tooltip=words.BUBBLE,
        ),
        _peak(run, forecast),
        _gradients(run),
        Headline(
            label="Plan",
            value=count(len(plan.stages), "stage") if plan else "none yet",
            delta=numbers or "cut the model first",
            tooltip=words.PLAN,
        ),
    )


def _ms(forecast: PlayedSchedule | None) -> str:
    if forecast is None:
        return NOT_MEASURED
    return f"{forecast.makespan_ms:,.1f} ms" if forecast.makespan_ms < 1000 else f"{forecast.makespan_ms / 1000:.2f} s"


def _gain(forecast: PlayedSchedule | None) -> str:
    """Speed of the ranks against a single rank that does all their work, in words."""
    if forecast is None or not forecast.makespan_ms:
        return "the blocks are priced first"
    work = sum(use.busy_ms for use in forecast.ranks)
    return f"{work / forecast.makespan_ms:.2f}× as fast as one rank"


def _waits(shown: PlayedSchedule | None, predicted: PlayedSchedule | None, old: PlayedSchedule | None) -> str:
    if predicted is not None:
        return f"predicted {percent(predicted.bubble_fraction)}"
    if old is not None:
        return f"an earlier plan: {percent(old.bubble_fraction)}"
    most = max(shown.ranks, key=lambda use: use.bubble_fraction, default=None) if shown else None
    return f"most on rank {most.rank}: {percent(most.bubble_fraction)}" if most else "ranks waiting"


def _against(run: PipelineRun | None, shown: PlayedSchedule | None, predicted: PlayedSchedule | None) -> str:
    if run is None or shown is None or predicted is None:
        return ""
    if run.wall is not None:
        # Links, and on one machine contention, are in the measured step; the prediction knows neither.
        return f"predicted {_ms(predicted)} with free links"
    off = change(predicted.makespan_ms, shown.makespan_ms)
    return f"predicted {_ms(predicted)}" + (f", off by {percent(off, signed=True)}" if off is not None else "")


def _peak(run: PipelineRun | None, forecast: PlayedSchedule | None) -> Headline:
    memory = forecast.memory if forecast else ()
    if run is not None and run.memory:
        memory = run.memory
    worst = fullest(memory)
    if worst is None:
        return Headline(label="Highest peak", value=NOT_MEASURED, delta="of any rank", tooltip=words.PEAK)
    predicted = {memory.rank: memory for memory in run.predicted.memory} if run is not None and run.predicted else {}
    guess = predicted.get(worst.rank) if worst.origin != "predicted" else None
    at = f"in {worst.peak_action}" if worst.peak_action else "between actions"
    state = f", + {mib(worst.optimizer_bytes)} optimizer" if worst.optimizer_bytes else ""
    return Headline(
        label=f"Peak of rank {worst.rank}",
        value=mib(worst.peak_bytes),
        delta=(f"predicted {mib(guess.peak_bytes)}" if guess else at) + state,
        origin=(worst.origin,),
        tooltip=words.PEAK,
    )


def fullest(memory: tuple[RankMemory, ...]) -> RankMemory | None:
    """The rank whose device has to hold most."""
    return max(memory, key=lambda memory: memory.device_bytes or 0, default=None)


def _gradients(run: PipelineRun | None) -> Headline:
    if run is None or not run.gradients:
        return Headline(label="Gradients", value="not compared", delta="press Run", tooltip=words.TRUTH)
    outcome, lost = "bitwise equal to unsplit", sum(s.splitting.presence == "baseline only" for s in run.moved)
    if lost:
        outcome = f"bitwise equal; {lost} never came"
    elif run.moved:
        outcome = f"bitwise equal; {len(run.moved)} different"
    elif run.n_splitting_rounding:
        outcome = f"bitwise equal; {run.n_splitting_rounding} by rounding"
    return Headline(
        label="Gradients",
        value=f"{run.n_splitting_equal} of {len(run.gradients)}",
        delta=outcome,
        origin=("measured",),
        tooltip=words.TRUTH,
    )
