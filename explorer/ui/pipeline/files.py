"""Downloads of the Pipeline page: the policy file with the plan, and the files for torchrun on real ranks."""

from __future__ import annotations

import io
import zipfile

import streamlit as st

from explorer.errors import ExplorerError
from explorer.plan.export.torchrun import NEEDS, run_files
from explorer.plan.policy import file as policy_file
from explorer.record.graph import Hazard
from explorer.record.policy_file import PolicyFile
from explorer.record.run import PipelinePlan, RunSpec
from explorer.ui.session import backend
from explorer.ui.session.plain import plain
from explorer.ui.shared.download import Offer, download
from explorer.ui.shared.fold import fold
from explorer.ui.shared.reports import report_button
from explorer.view.compare.headline import danger

FOLDER = "pipeline-run"


def files_panel(spec: RunSpec, plan: PipelinePlan, hazards: tuple[Hazard, ...], run_key: str | None) -> None:
    """Draws the downloads; `spec` holds the plan. `run_key`: key of the plan's run, if the plan has run."""
    if run_key is not None:
        report_button(run_key, stem=FOLDER, widget="pipeline_report")
    if warning := danger(hazards, "Hazards"):
        st.error(f"This plan is not safe. {plain(warning)}", icon=":material/gpp_bad:")
    graph = backend.graph_of(spec)

    def policy_text() -> str:
        unread = PolicyFile(policy=spec.policy, model=spec.model, pipeline=plan)
        return policy_file.dumps(policy_file.file_of(spec.policy, graph, plan=plan) if graph else unread)

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
