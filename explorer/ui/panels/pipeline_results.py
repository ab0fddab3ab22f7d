"""What came of a plan: the schedule in time, memory by rank, whose fault a difference is, how often blocks ran."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import msgspec
import streamlit as st

from explorer.errors import ExplorerError
from explorer.plan import policy_file
from explorer.plan.export_pipeline import run_files
from explorer.record.pipeline import Forecast, PipelineRun
from explorer.record.plan import PipelinePlan
from explorer.record.run import RunSpec
from explorer.ui import backend
from explorer.ui.panels.charts import chart, twin
from explorer.ui.panels.failure import failure_panel
from explorer.view import pipeline as view

NOT_YET = "Drawn from the prediction. Press **Run** to measure this plan and compare its gradients."
OLDER = ":orange-badge[:material/history: for an earlier plan] The plan was changed since this run."


def result_tabs(
    run: PipelineRun | None, forecast: Forecast | None, *, spec: RunSpec, plan: PipelinePlan | None, fresh: bool
) -> None:
    """The tabs. An older run is shown and marked as such; a new plan shows its prediction."""
    if run is not None and run.failure is not None:
        failure_panel(run.failure, key="pipeline_run_failed")
    schedule, memory, truth, calls, files = st.tabs(["Schedule", "Memory", "Gradients", "Calls", "Files"])
    with schedule:
        _schedule(run if fresh else None, forecast)
    with memory:
        _memory(run if fresh else None, forecast)
    with truth:
        _truth(run, fresh=fresh)
    with calls:
        _calls(run, fresh=fresh)
    with files:
        _files(spec, plan)


def _schedule(run: PipelineRun | None, forecast: Forecast | None) -> None:
    measured = run.composed if run is not None else None
    shown = measured or forecast
    if shown is None:
        st.caption("The price of each block is being measured; the schedule is drawn from it.")
        return
    if measured is None:
        st.caption(NOT_YET)
    chart(
        view.gantt(shown, forecast if measured is not None else None),
        key="pipeline_gantt",
        alt=f"Actions of {len(shown.ranks)} ranks over {shown.makespan_ms:.1f} ms, one row a rank.",
    )
    st.caption(
        "Numbers are microbatches. A dark border marks the critical path: to shorten the step, shorten one of these. "
        + ("The thin row below each rank is what was predicted." if measured is not None else "")
    )
    for note in run.notes if run is not None else ():
        st.text(note)
    twin(view.gantt_table(shown), key="pipeline_actions", what="actions")


def _memory(run: PipelineRun | None, forecast: Forecast | None) -> None:
    memory = run.memory if run is not None and run.memory else (forecast.memory if forecast else ())
    if not memory:
        st.caption("Memory by rank is neither measured nor predicted yet.")
        return
    if run is None:
        st.caption(NOT_YET)
    predicted = run.predicted.memory if run is not None and run.predicted else ()
    chart(view.memory_chart(memory), key="pipeline_memory", alt="Held bytes of each rank over the step.")
    chart(view.bands_chart(memory), key="pipeline_bands", alt="What the peak of each rank is made of.")
    if run is not None and run.predicted is not None:
        chart(view.against_chart(run), key="pipeline_against", alt="Predicted beside measured peak of each rank.")
    twin(view.memory_table(memory, predicted), key="pipeline_ranks", what="memory by rank")


def _truth(run: PipelineRun | None, *, fresh: bool) -> None:
    if run is None or not run.gradients:
        st.caption(
            "After a run: the full batch, the microbatched, the recomputed and the split model are compared gradient "
            "by gradient, so that a difference has a cause."
        )
        return
    if not fresh:
        st.markdown(OLDER)
    chart(view.truth_chart(run), key="pipeline_truth", alt="Gradients that each step left equal, by verdict.")
    twin(view.truth_table(run), key="pipeline_gradients", what="gradients by cause")


def _calls(run: PipelineRun | None, *, fresh: bool) -> None:
    if run is None or not run.blocks:
        st.caption("After a run: how often each block ran forward, counted. Recompute shows as a second run.")
        return
    if not fresh:
        st.markdown(OLDER)
    chart(view.calls_chart(run), key="pipeline_calls", alt="Runs per forward call of each block.")
    twin(view.calls_table(run), key="pipeline_counts", what="forward calls")


def _files(spec: RunSpec, plan: PipelinePlan | None) -> None:
    """The policy file with the plan, and what torchrun needs."""
    if plan is None:
        st.caption("There is no plan yet.")
        return
    full = msgspec.structs.replace(spec, plan=plan)
    graph = backend.graph_of(spec.model)
    st.download_button(
        "Policy file with the plan (YAML)",
        data=lambda: policy_file.dumps(
            spec.policy, model=spec.model, fingerprint=graph.fingerprint if graph else None, plan=plan
        ),
        file_name="pipeline-policy.yaml",
        mime="application/yaml",
        key="pipeline_policy",
        icon=":material/download:",
        on_click="ignore",
    )
    st.markdown("**On real ranks**, one GPU each: unpack these files, run the script, open what the ranks leave.")
    try:
        files = run_files(full, Path("pipeline-run"))
    except ExplorerError as error:
        st.caption(f"These files need a plan that can run: {error.sentence}")
        return
    st.download_button(
        "torchrun script, plan and schedule (zip)",
        data=lambda: _zipped(files),
        file_name="pipeline-run.zip",
        mime="application/zip",
        key="pipeline_torchrun",
        icon=":material/terminal:",
        on_click="ignore",
        help="Unpack it where torchrun starts. `python -m explorer pipeline --results DIR` opens what its ranks leave.",
    )
    with st.expander("Schedule as text, one line a rank", icon=":material/table_rows:", key="pipeline_csv"):
        st.code(files["schedule.csv"], language=None)


def _zipped(files: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(f"pipeline-run/{name}", text)
    return packed.getvalue()
