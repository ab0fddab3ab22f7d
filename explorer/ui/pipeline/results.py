"""Results of a plan: the schedule in time, memory by rank, causes of differences, number of runs of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import streamlit as st

from explorer.record.graph import Hazard
from explorer.record.pipeline_run import PipelineRun, PlayedSchedule, RankMemory
from explorer.record.run import PipelinePlan, RunSpec
from explorer.ui.pipeline.files import files_panel
from explorer.ui.pipeline.state import PipelineState
from explorer.ui.session.plain import plain
from explorer.ui.shared.charts import draw
from explorer.ui.shared.failure import failure_panel
from explorer.ui.shared.hazards import hazards_panel
from explorer.ui.shared.readable import small
from explorer.view.drawing.units import count
from explorer.view.pipeline import gantt, ranks
from explorer.view.pipeline import shares as splitting
from explorer.view.pipeline.headline import prices_held
from explorer.view.text import pipeline as words

ALL_MICROBATCHES = "all microbatches"
ALL_RANKS = "all ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Known results of the drawn plan."""

    spec: RunSpec
    """With the plan."""
    plan: PipelinePlan
    run: PipelineRun | None
    """The last run: of this plan where `fresh`."""
    fresh: bool
    forecast: PlayedSchedule | None
    fault: str = ""
    """Reason why the plan cannot run."""
    hazards: tuple[Hazard, ...] = ()

    @property
    def own_run(self) -> PipelineRun | None:
        return self.run if self.fresh else None


def result_tabs(known: Results, split: PipelineState) -> None:
    """Draws the tabs; hidden tabs are not computed. An older run has a mark; a new plan shows its prediction."""
    run = known.run
    if run is not None and run.failure is not None and _failed(run):
        split.shown = None
        st.rerun()
    names = ["Schedule", "Memory", "Gradients", "Calls", "Hazards", "Files"]
    tabs = st.tabs(
        [f"{name} ({len(known.hazards)})" if name == "Hazards" else name for name in names],
        key="pipeline_tabs",
        on_change="rerun",
    )
    bodies: tuple[Callable[[], None], ...] = (
        lambda: _schedule(known),
        lambda: _memory(known),
        lambda: _truth(known),
        lambda: _calls(known),
        lambda: hazards_panel(known.hazards),
        lambda: files_panel(known.spec, known.plan, known.hazards, split.shown if known.fresh else None),
    )
    for tab, body in zip(tabs, bodies):
        if tab.open:
            with tab:
                body()


def _failed(run: PipelineRun) -> bool:
    """A run without a result, its rank named; returns whether a person closed it."""
    assert run.failure is not None, "asked of failed runs only"
    if run.failed_rank is not None:
        st.markdown(
            f":red-badge[:material/error: rank {run.failed_rank}] ended this run; the other ranks were stopped."
        )
    return failure_panel(run.failure, key="pipeline_run_failed")


def _schedule(known: Results) -> None:
    run = known.own_run
    measured = run.timing if run is not None else None
    shown = measured or known.forecast
    if shown is None:
        st.caption(words.EMPTY_SCHEDULE)
        return
    _multiplied(known.hazards)
    state, picker = st.columns([8, 3], vertical_alignment="center")
    predicted = run.predicted if run is not None and measured is not None else None
    with state:
        if measured is None:
            small(words.NOT_YET)
        else:
            small(words.MEASURED if predicted else words.MEASURED.partition("]")[0] + "]")
    with picker:
        follow = st.selectbox(
            "Follow a microbatch",
            [ALL_MICROBATCHES, *range(known.plan.n_microbatches)],
            format_func=lambda i: f"microbatch {i}" if isinstance(i, int) else i,
            key="pipeline_follow",
            label_visibility="collapsed",
            help=words.FOLLOW,
        )
    followed = follow if isinstance(follow, int) and follow < known.plan.n_microbatches else None
    draw(gantt.gantt(shown, predicted, follow=followed), key="pipeline_gantt")
    st.caption(words.LEGEND, help=f"{words.BUBBLE}\n\n{words.CRITICAL}\n\n{words.RANK}")
    if run is not None and (spread := prices_held(run)):
        st.caption(spread)
    for note in run.notes if run is not None else ():
        st.text(note)
    st.dataframe(
        gantt.rank_table(shown, predicted),
        key="pipeline_ranks_busy",
        hide_index=True,
        width="stretch",
        alt="Busy and idle time of each rank",
    )
    if run is not None and run.wall is not None and (waits := gantt.link_table(run.wall, run.stages)):
        st.caption(words.LINKS)
        st.dataframe(waits, key="pipeline_links", hide_index=True, width="stretch", alt="Waits for transfers")


def _multiplied(hazards: tuple[Hazard, ...]) -> None:
    """Warns of multiplied recompute beside the schedule, not only in the list of hazards."""
    for hazard in hazards:
        if hazard.rule == "multiplied-recompute":
            st.warning(plain(f"{hazard.sentence} {hazard.remedy}"), icon=":material/warning:")


def _memory(known: Results) -> None:
    run = known.own_run
    measured = run is not None and bool(run.memory)
    memory = run.memory if run is not None and measured else (known.forecast.memory if known.forecast else ())
    if not memory:
        st.caption("Memory by rank is neither measured nor predicted yet.")
        return
    state, picker = st.columns([8, 3], vertical_alignment="center")
    with state:
        small(words.MEASURED.partition("]")[0] + "]" if measured else words.NOT_YET, help=words.RECEIVE)
    one = _picked_rank(memory, picker)
    predicted = run.predicted.memory if run is not None and run.predicted else ()
    if one is None:
        draw(ranks.memory_chart(memory, predicted), key="pipeline_memory")
        draw(ranks.bands_chart(memory), key="pipeline_bands")
    else:
        draw(ranks.rank_chart(one, predicted), key="pipeline_rank")
    if run is not None and predicted:
        draw(ranks.against_chart(run), key="pipeline_against")


def _picked_rank(memory: tuple[RankMemory, ...], place: st.delta_generator.DeltaGenerator) -> RankMemory | None:
    by_rank = {one.rank: one for one in memory}
    with place:
        rank = st.selectbox(
            "Rank",
            [ALL_RANKS, *by_rank],
            format_func=lambda rank: f"rank {rank}" if isinstance(rank, int) else rank,
            key="pipeline_rank_picked",
            label_visibility="collapsed",
            help="One rank shows its receive buffers as a band of their own over the step.",
        )
    return by_rank.get(rank) if isinstance(rank, int) else None


def _truth(known: Results) -> None:
    run = known.run
    if run is None or not run.gradients:
        st.caption(words.EMPTY_TRUTH)
        return
    if not known.fresh:
        st.markdown(words.OLDER)
    draw(splitting.truth_chart(run), key="pipeline_truth")
    st.caption(words.READ_TRUTH)
    moved = [row for row in splitting.truth_table(run) if row["splitting"] != "0 (bitwise)"]
    if moved:
        st.markdown(f"**Moved by splitting: {count(len(moved), 'tensor')}**")
        st.dataframe(moved, key="pipeline_moved", hide_index=True, width="stretch", alt="Tensors moved by splitting")
    for note in run.notes:
        st.text(note)


def _calls(known: Results) -> None:
    run = known.run
    if run is None or not run.blocks:
        st.caption(words.EMPTY_CALLS)
        return
    if not known.fresh:
        st.markdown(words.OLDER)
    worst = max(run.blocks, key=lambda block: block.multiplier)
    if worst.multiplier > 2:
        schedule = run.spec.plan.schedule_name if run.spec.plan else "This schedule"
        st.warning(
            f"{schedule} ran a recomputed block {worst.multiplier:g} times for each forward call: it multiplies the "
            "recompute. 1F1B runs it twice.",
            icon=":material/warning:",
        )
    draw(splitting.calls_chart(run), key="pipeline_calls")
