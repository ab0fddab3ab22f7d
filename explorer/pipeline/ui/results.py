"""Results of a split: the schedule in time, memory by rank, causes of differences, number of runs, and its files."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import streamlit as st

from explorer.errors import ExplorerError
from explorer.pipeline.plan.export import NEEDS, run_files
from explorer.pipeline.plan.schedules import splits_backward
from explorer.pipeline.record.step import PipelineProfile, PipelineRun, PlayedSchedule
from explorer.pipeline.ui.equal_ranks import schedules_table
from explorer.pipeline.ui.state import PipelineState
from explorer.pipeline.view import text as words
from explorer.pipeline.view.gantt import gantt, link_table, rank_table
from explorer.pipeline.view.results import bands_chart, calls_chart, memory_chart, truth_chart, truth_table
from explorer.plan.policy import file as policy_file
from explorer.record.files import PolicyFile
from explorer.record.graph import Hazard, ModelGraph
from explorer.record.run import PipelinePlan, RunSpec
from explorer.ui.session import backend
from explorer.ui.session.repository import runs
from explorer.ui.shared.charts import draw, made_once
from explorer.ui.shared.download import Offer, download, report_button
from explorer.ui.shared.elements import escape, failure_panel, fold, frame, hazards_panel, small_text
from explorer.view.compare.headline import danger
from explorer.view.drawing.units import count

FOLDER = "pipeline-run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Known results of the drawn plan."""

    spec: RunSpec
    """With the plan."""
    plan: PipelinePlan
    graph: ModelGraph
    profile: PipelineProfile | None
    run: PipelineRun | None
    """The last run; if `fresh`, a run of this plan."""
    fresh: bool
    forecast: PlayedSchedule | None
    fault: str = ""
    """Reason why the plan cannot run."""
    hazards: tuple[Hazard, ...] = ()

    @property
    def own_run(self) -> PipelineRun | None:
        return self.run if self.fresh else None


def result_tabs(results: Results, split: PipelineState) -> None:
    """Draws the tabs; hidden tabs are not computed. An older run has a mark; a new plan shows its prediction."""
    run = results.run
    if run is not None and run.failure is not None:
        _failed(run, close=partial(setattr, split, "shown", None))
    names = ["Schedule", "Memory", "Gradients", "Calls", "Hazards", "Files"]
    tabs = st.tabs(
        [f"{name} ({len(results.hazards)})" if name == "Hazards" else name for name in names],
        key="pipeline_tabs",
        on_change="rerun",
    )
    bodies: tuple[Callable[[], None], ...] = (
        lambda: _schedule(results),
        lambda: _memory(results),
        lambda: _truth(results),
        lambda: _calls(results),
        lambda: hazards_panel(results.hazards),
        lambda: _files(results, split.shown if results.fresh else None),
    )
    for tab, body in zip(tabs, bodies):
        if tab.open:
            with tab:
                body()


def _failed(run: PipelineRun, close: Callable[[], None]) -> None:
    """Draws a run without a result, its rank named; `close` ends that."""
    assert run.failure is not None, "asked of failed runs only"
    if run.failed_rank is not None:
        st.markdown(
            f":red-badge[:material/error: rank {run.failed_rank}] ended this run; the other ranks were stopped."
        )
    failure_panel(run.failure, key="pipeline_run_failed", close=close)


def _schedule(results: Results) -> None:
    run = results.own_run
    measured = run.timing if run is not None else None
    shown = measured or results.forecast
    for hazard in results.hazards:  # beside the schedule too, not only in the list of hazards
        if hazard.rule == "multiplied-recompute":
            st.warning(escape(f"{hazard.sentence} {hazard.remedy}"), icon=":material/warning:")
    if shown is None:
        st.caption(words.NOT_PREDICTED if splits_backward(results.plan) else words.EMPTY_SCHEDULE)
        return
    predicted = run.predicted if run is not None and measured is not None else None
    small_text(words.NOT_YET if measured is None else words.MEASURED + words.THIN_ROWS * (predicted is not None))
    draw(gantt(shown, predicted), key="pipeline_gantt")
    st.caption(words.LEGEND, help=f"{words.BUBBLE}\n\n{words.CRITICAL}\n\n{words.RANK}")
    for note in run.notes if run is not None else ():
        st.text(note)
    frame(rank_table(shown, predicted), key="pipeline_ranks_busy", alt="Busy and idle time of each rank")
    _schedules(results, len(shown.ranks))
    if run is not None and run.wall is not None and (waits := link_table(run.wall, run.stages)):
        st.caption(words.LINKS)
        frame(waits, key="pipeline_links", alt="Waits for transfers")


def _schedules(results: Results, n_ranks: int) -> None:
    """Draws the table of all schedules on the ranks of the drawn plan."""
    profile, plan = results.profile, results.plan
    if profile is None:
        return
    policy = results.spec.policy
    rows = made_once(
        lambda: schedules_table(profile, results.graph, plan, policy, n_ranks), profile, str(plan), policy, n_ranks
    )
    title = f"All schedules on {count(n_ranks, 'rank')}, {count(plan.n_microbatches, 'microbatch', 'microbatches')}"
    st.markdown(f"**{title}**", help=words.EQUAL_RANKS)
    frame(rows, key="pipeline_schedules", alt=title)


def _memory(results: Results) -> None:
    run = results.own_run
    measured = run.memory if run is not None else ()
    memory = measured or (results.forecast.memory if results.forecast else ())
    if not memory:
        st.caption("Memory by rank is neither measured nor predicted yet.")
        return
    small_text(words.MEASURED if measured else words.NOT_YET, help=words.RECEIVE)
    predicted = run.predicted.memory if run is not None and run.predicted else ()
    draw(memory_chart(memory, predicted), key="pipeline_memory")
    draw(bands_chart(memory), key="pipeline_bands")


def _truth(results: Results) -> None:
    run = results.run
    if run is None or not run.gradients:
        st.caption(words.EMPTY_TRUTH)
        return
    if not results.fresh:
        st.markdown(words.OLDER)
    draw(truth_chart(run), key="pipeline_truth")
    st.caption(words.READ_TRUTH)
    moved = [row for row in truth_table(run) if row["splitting"] != "0 (bitwise)"]
    if moved:
        st.markdown(f"**Moved by splitting: {count(len(moved), 'tensor')}**")
        frame(moved, key="pipeline_moved", alt="Tensors moved by splitting")
    for note in run.notes:
        st.text(note)


def _calls(results: Results) -> None:
    run = results.run
    if run is None or not run.blocks:
        st.caption(words.EMPTY_CALLS)
        return
    if not results.fresh:
        st.markdown(words.OLDER)
    worst = max(run.blocks, key=lambda block: block.multiplier)
    if worst.multiplier > 2:
        schedule = run.spec.plan.schedule_name if run.spec.plan else "This schedule"
        st.warning(
            f"{schedule} ran a recomputed block {worst.multiplier:g} times for each forward call: it multiplies the "
            "recompute. 1F1B runs it twice.",
            icon=":material/warning:",
        )
    draw(calls_chart(run), key="pipeline_calls")


def _files(results: Results, run_key: str | None) -> None:
    """The policy file with the plan, and files for torchrun on real ranks. `run_key`: key of the plan's run, if any."""
    spec, plan = results.spec, results.plan
    if run_key is not None:
        report_button(run_key, stem=FOLDER, widget="pipeline_report")
    if warning := danger(results.hazards, "Hazards"):
        st.error(f"This plan is not safe. {escape(warning)}", icon=":material/gpp_bad:")
    graph = runs().graph(spec)

    def policy_text() -> str:
        bare = PolicyFile(policy=spec.policy, model=spec.model, pipeline=plan)
        return policy_file.dumps(policy_file.file_of(spec.policy, graph, plan=plan) if graph else bare)

    download(Offer("Policy file with the plan (YAML)", "pipeline-policy.yaml", policy_text), key="pipeline_policy")
    st.markdown("**On real ranks**, one GPU each: unpack these files, run the script, open what the ranks leave.")
    st.caption(NEEDS)
    try:
        backend.check_offered(spec.model)  # the text of its file goes along
        files = run_files(spec)
    except ExplorerError as error:
        st.caption("These files need a plan that can run.")
        st.text(error.sentence)
        return
    scripts = Offer(
        "torchrun script, plan and schedule (zip)",
        f"{FOLDER}.zip",
        lambda: zipped(files),
        icon="terminal",
        help="Unpack it where torchrun starts. `python -m explorer pipeline --results DIR` opens what its ranks leave.",
    )
    download(scripts, key="pipeline_torchrun")
    with fold("Schedule as text, one line a rank", icon=":material/table_rows:", key="pipeline_csv"):
        st.code(files["schedule.csv"], language=None)


def zipped(files: dict[str, str]) -> bytes:
    """A zip archive with all files in one folder."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(f"{FOLDER}/{name}", text)
    return packed.getvalue()
