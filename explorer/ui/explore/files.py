"""Files of the Explore page: the policy, its form for another program, the run; and a policy that comes back in."""

from __future__ import annotations

from functools import partial

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from explorer.errors import ExplorerError, UnreadableFile, message_of
from explorer.jobs import run_file
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.hazards.hazards import hazards
from explorer.plan.policy import file as policy_file
from explorer.plan.policy import read_policy
from explorer.plan.policy.file import evidence_of
from explorer.record.comparison import Comparison
from explorer.record.files import PolicyFile, Reading
from explorer.record.graph import ModelGraph
from explorer.ui.explore import work
from explorer.ui.explore.work import ExploreState
from explorer.ui.session import backend, page_job
from explorer.ui.session.repository import request_key, runs
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.download import Offer, download, report_button, trace_buttons
from explorer.ui.shared.elements import escape, small_text
from explorer.view.compare.headline import doubt, warning_lines
from explorer.view.report.explorable import file_stem
from explorer.view.text.plan import export_sentences

LARGEST_POLICY = 1_000_000
"""Largest policy file that is read, in bytes."""
COLOURS = {"exact": "green", "approximated": "orange"}
MOST_NAMED = 12


def policy_menu(state: ExploreState, graph: ModelGraph) -> DeltaGenerator:
    """Download and import of the policy. Returns the place of a warning above them."""
    with st.popover("Policy file", icon=":material/description:", key="policy_menu", width="stretch"):
        warning = st.empty()
        small_text("A training script applies it: `explorer.apply_policy(model, explorer.load_policy('policy.yaml'))`.")
        offer = Offer(
            "Download (YAML)",
            f"{file_stem(state.draft.spec.model)}-policy.yaml",
            lambda: policy_text(state, graph),
        )
        download(offer, key="download_policy", width="stretch")
        _export(state, graph, policy_of(state, graph), _warning(state, graph))
        st.file_uploader(
            "Open a policy file",
            type=list(read_policy.SUFFIXES),
            key="upload_policy",
            max_upload_size=1,
            on_change=lambda: _take_upload(state, graph),
            help="YAML or JSON; nothing in it is executed.",
        )
    return warning


def _export(state: ExploreState, graph: ModelGraph, file: PolicyFile, warning: str) -> None:
    """Draws a choice of programs, then the program's verdict, recompute and file. `warning` goes on top."""
    target = st.selectbox(
        "For another program",
        list(FORMATS),
        format_func=lambda name: FORMATS[name].title,
        key="export_target",
        help="The policy in the words of a framework, and what is lost on the way there.",
    )
    try:
        form = exported(file, target)
    except ExplorerError as error:
        small_text(escape(str(error)))
        return
    small_text(f":{COLOURS[form.fit]}-badge[{form.fit}] in {form.written_for}")
    for sentence in export_sentences(form, MOST_NAMED):
        small_text(escape(sentence))
    suffix = FORMATS[target].suffix
    text = (warning if suffix in (".py", ".yaml") else "") + form.text
    offer = Offer(f"For {FORMATS[target].title}", f"policy-{target}{suffix}", text, icon="code")
    download(offer, key="download_export", width="stretch")
    if form.fit == "approximated" and form.as_run is not None:
        st.button(
            "Draw what it will do there",
            key="draw_export",
            icon=":material/draw:",
            on_click=drafts.set_policy,
            args=(state.draft, form.as_run, graph),
            width="stretch",
            help="As a policy that Run measures; undo brings yours back.",
        )


def _take_upload(state: ExploreState, graph: ModelGraph) -> None:
    upload = st.session_state.get("upload_policy")
    if upload is not None:  # None: a person took the file out again
        take_policy(state, graph, upload.getvalue())


def take_policy(state: ExploreState, graph: ModelGraph, data: bytes) -> None:
    """Replaces the policy by the one in `data`; undo restores the old policy. An error becomes a failure."""
    with page_job.refusing(state.job):
        if len(data) > LARGEST_POLICY:
            raise UnreadableFile(f"The policy file has {len(data):,} bytes; at most {LARGEST_POLICY:,} are read.")
        read = read_policy.read(_text(data), graph)
        drafts.set_policy(state.draft, read.policy, graph)
        state.job.failure = None
        state.doubt = doubt(read.file.evidence.verdict if read.file.evidence else None)
        state.imported = read if read.messages else None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"The policy file is not text: {message_of(error)}.", hint="A policy file is YAML in UTF-8."
        ) from error


def imported_notes(state: ExploreState, read: Reading) -> None:
    """Draws notes on an imported policy, until a person dismisses them."""
    with st.container(border=True, key="read_policy"):
        for sentence in read.messages:
            small_text(escape(sentence))
        understood = partial(setattr, state, "imported", None)
        st.button("Understood", key="read_understood", type="tertiary", icon=":material/check:", on_click=understood)


def policy_of(state: ExploreState, graph: ModelGraph) -> PolicyFile:
    """The drawn policy, with the evidence of the last run if the run used exactly this policy."""
    work.absorb(state, graph)
    spec = state.draft.spec
    shown = work.result(state, "shown")
    measured = isinstance(shown, Comparison) and shown.candidate.spec == spec
    evidence = evidence_of(shown, graph) if measured else None
    return policy_file.file_of(spec.policy, graph, ranks=spec.ranks, evidence=evidence)


def policy_text(state: ExploreState, graph: ModelGraph) -> str:
    """The YAML file."""
    return _warning(state, graph) + policy_file.dumps(policy_of(state, graph))


def _warning(state: ExploreState, graph: ModelGraph) -> str:
    """Known hazards, as the first lines of the file."""
    spec = state.draft.spec
    return warning_lines(hazards(graph, spec.policy, spec.plan, spec))


def run_menu(state: ExploreState) -> None:
    """Draws the download of the shown run."""
    key = state.shown or state.baseline
    what, shown = "played without data" if state.draft.predict else "measured", work.result(state, "shown")
    if isinstance(shown, Comparison) and shown.is_predicted:  # the file holds the predicted run
        key = request_key(shown.candidate.spec)
    with st.popover("Run file", icon=":material/save:", key="run_menu", width="stretch", disabled=key is None):
        st.caption(f"Everything that was {what}, in one file: it opens on the Runs page of any machine, without torch.")
        if key is not None:
            stem = file_stem(state.draft.spec.model)
            download(Offer("This run", f"{stem}.run", lambda: run_bytes(key)), key="download_run", width="stretch")
            report_button(key, stem=stem, widget="download_report", width="stretch")
            trace_buttons(key, stem=stem, widget="download_trace")


def run_bytes(key: str) -> bytes:
    """The run file of the run under `key`, also of one that the store could not keep."""
    try:
        return backend.store().export_file(key)
    except ExplorerError:
        record = runs().in_memory(key)
        if record is None:
            raise
        return run_file.write(run_file.stored_record(record))
