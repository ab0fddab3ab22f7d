"""Choice of the schedule: by name on a number of ranks, or as rows of a person's file."""

from __future__ import annotations

import streamlit as st

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.actions import format_rows, rows_in
from explorer.plan.pipeline.cuts import stages_by
from explorer.plan.pipeline.rules import check_rows
from explorer.plan.pipeline.schedules import SCHEDULES, default_ranks, rank_counts
from explorer.record.graph import ModelGraph
from explorer.record.run import OWN_SCHEDULE
from explorer.ui.pipeline import state as pipeline_state
from explorer.ui.pipeline.address import MOST_MICROBATCHES, PlanChoices
from explorer.ui.pipeline.state import PipelineState
from explorer.ui.session import page_job
from explorer.ui.session.bound import bound
from explorer.view.text import pipeline as words

RANKS_WIDTH = 85
UPLOAD = "upload_schedule"


def n_ranks_of(choices: PlanChoices, n_stages: int) -> int:
    """Number of ranks: the chosen number if the schedule allows it, else the schedule's default."""
    if choices.actions:
        return len(choices.actions)
    chosen = choices.n_ranks
    if chosen is not None and chosen in rank_counts(choices.schedule, n_stages):
        return chosen
    return default_ranks(choices.schedule, n_stages)


def schedule_picker(split: PipelineState, n_stages: int) -> None:
    """The schedule's name, and how many ranks share the stages."""
    names = [*SCHEDULES, *([OWN_SCHEDULE] if split.own_schedule else [])]
    shown = OWN_SCHEDULE if split.choices.actions else split.choices.schedule
    now = bound("pipeline_schedule", shown, lambda name: _choose(split, name))
    st.selectbox("Schedule", names, names.index(now.value), help=words.SCHEDULE, **now.wired)
    n_ranks = n_ranks_of(split.choices, n_stages)
    known = () if split.choices.actions else rank_counts(split.choices.schedule, n_stages)
    offered = sorted({*known, n_ranks})
    number = bound("pipeline_n_ranks", n_ranks, lambda n: pipeline_state.choose(split, "n_ranks", n))
    st.selectbox(
        "Ranks", offered, offered.index(number.value), disabled=len(offered) < 2, help=words.RANKS, width=RANKS_WIDTH,
        **number.wired,
    )  # fmt: skip


def _choose(split: PipelineState, name: str) -> None:
    own = name == OWN_SCHEDULE
    pipeline_state.choose(split, "actions", split.own_schedule if own else ())
    if not own:
        pipeline_state.choose(split, "schedule", name)


def schedule_file(split: PipelineState, graph: ModelGraph) -> None:
    """Draws the field for a person's schedule file."""
    st.file_uploader(
        "Own schedule (CSV)",
        type=["csv", "txt"],
        key=UPLOAD,
        max_upload_size=1,
        on_change=_take,
        args=(split, graph),
        help=words.OWN_SCHEDULE,
    )
    if split.choices.actions:
        st.caption(words.OWN_NOT_IN_LINK)


def _take(split: PipelineState, graph: ModelGraph) -> None:
    given = st.session_state.get(UPLOAD)
    if given is not None:  # None: a person took the file out again
        take_schedule(split, graph, given.name, given.getvalue())


def take_schedule(split: PipelineState, graph: ModelGraph, name: str, data: bytes) -> None:
    """Takes the rows of a file as the schedule, with the stages and microbatches that the rows name."""
    split.job.failure = None
    with page_job.refusing(split.job):
        rows = rows_in(data, name)
        n_stages = 1 + max(action.stage for row in rows for action in row)
        n_microbatches = 1 + max(action.microbatch for row in rows for action in row)
        if n_microbatches > MOST_MICROBATCHES:
            raise InvalidPlan(
                f"The schedule {name} names {n_microbatches} microbatches; the page takes {MOST_MICROBATCHES} at most.",
                hint="Run it with `python -m explorer pipeline MODEL --rows FILE`.",
            )
        check_rows(rows, n_stages=n_stages, n_microbatches=n_microbatches)
        if len(pipeline_state.stages_of(split, graph)) != n_stages:
            pipeline_state.cut_at(split, graph, stages_by("by-parameters", graph, n_stages))
        split.own_schedule = format_rows(rows)
        pipeline_state.choose(split, "actions", split.own_schedule)
        pipeline_state.choose(split, "n_microbatches", n_microbatches)
