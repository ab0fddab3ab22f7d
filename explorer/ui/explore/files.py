"""Leaving with something: the policy file, its form for another program, the run; coming back with a policy file."""

from __future__ import annotations

import re
from typing import Any

import streamlit as st

from explorer.errors import ExplorerError, UnreadableFile, message_of
from explorer.jobs import run_file
from explorer.plan.hazards.hazards import hazards
from explorer.plan.imports import read_policy
from explorer.plan.imports.read_policy import POLICY_FILE, SUFFIXES
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.file import evidence_of
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.policy_file import PolicyFile
from explorer.ui.explore import exports, work
from explorer.ui.explore.state import ExploreState
from explorer.ui.session import backend, page_job
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.download import Offer, download
from explorer.ui.shared.readable import small
from explorer.ui.shared.reports import report_button
from explorer.view.compare.headline import doubt, in_file

LARGEST_POLICY = 1_000_000
"""Largest policy file that is read, in bytes."""


def policy_menu(state: ExploreState, graph: ModelGraph) -> Any:
    """Download and import of the policy. Returns the place of a warning above them."""
    with st.popover("Policy file", icon=":material/description:", key="policy_menu", width="stretch"):
        warned = st.empty()
        small("A training script applies it: `explorer.apply_policy(model, explorer.load_policy('policy.yaml'))`.")
        offer = Offer(
            "Policy with evidence (YAML)", f"{file_stem(state)}-policy.yaml", lambda: policy_text(state, graph)
        )
        download(offer, key="download_policy", width="stretch")
        exports.panel(state, graph, policy_of(state, graph), _warning(state, graph))
        st.file_uploader(
            "Open a policy, or a program's settings",
            type=list(SUFFIXES),
            key="upload_policy",
            max_upload_size=1,
            on_change=lambda: _take_upload(state, graph),
            help="A policy file, or recompute settings of transformers, torchtitan or Megatron-LM as YAML, JSON, TOML, "
            "flags or a call in Python: nothing is executed, and what is lost is said.",
        )
    return warned


def _take_upload(state: ExploreState, graph: ModelGraph) -> None:
    given = st.session_state.get("upload_policy")
    if given is not None:  # None: a person took the file out again
        take_policy(state, graph, given.getvalue())


def take_policy(state: ExploreState, graph: ModelGraph, data: bytes) -> None:
    """Replaces the policy by the one in `data`; undo restores the old policy. An error becomes a failure."""
    with page_job.refusing(state.job):
        if len(data) > LARGEST_POLICY:
            raise UnreadableFile(f"The policy file has {len(data):,} bytes; at most {LARGEST_POLICY:,} are read.")
        read = read_policy.read(_text(data), graph)
        drafts.set_policy(state.draft, read.policy, graph)
        state.job.failure = None
        state.doubt = doubt(read.file.evidence.verdict if read.file.evidence else None)
        state.read = read if read.told or read.source != POLICY_FILE else None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"The policy file is not text: {message_of(error)}.", hint="A policy file is YAML in UTF-8."
        ) from error


def policy_of(state: ExploreState, graph: ModelGraph) -> PolicyFile:
    """The drawn policy, with the evidence of the last run if the run used exactly this policy."""
    drafts.absorb(state.draft, graph)
    spec = state.draft.spec
    shown = work.result(state, "shown")
    measured = isinstance(shown, Comparison) and shown.candidate.spec == spec
    return policy_file.file_of(
        spec.policy, graph, plan=spec.plan, evidence=evidence_of(shown, graph) if measured else None
    )


def policy_text(state: ExploreState, graph: ModelGraph) -> str:
    """The YAML file."""
    return _warning(state, graph) + policy_file.dumps(policy_of(state, graph))


def _warning(state: ExploreState, graph: ModelGraph) -> str:
    """Known hazards, as the first lines of the file."""
    spec = state.draft.spec
    return in_file(hazards(graph, spec.policy, spec.plan, spec))


def file_stem(state: ExploreState) -> str:
    """A file name that any system takes."""
    return (
        re.sub(r"\W+", "-", state.draft.spec.model.target.removesuffix(".py").rpartition("/")[2]).strip("-") or "model"
    )


def run_menu(state: ExploreState) -> None:
    """Draws the download of the shown run."""
    key = state.shown or state.baseline
    what, shown = "played without data" if state.draft.predict else "measured", work.result(state, "shown")
    if isinstance(shown, Comparison) and shown.is_predicted:  # the file holds the predicted run
        key = backend.foreseen_key(shown.candidate.spec)
    with st.popover("Run file", icon=":material/save:", key="run_menu", width="stretch", disabled=key is None):
        st.caption(f"Everything that was {what}, in one file: it opens on the Runs page of any machine, without torch.")
        if key is not None:
            stem = file_stem(state)
            download(Offer("This run", f"{stem}.run", lambda: run_bytes(key)), key="download_run", width="stretch")
            report_button(key, stem=stem, widget="download_report", width="stretch")


def run_bytes(key: str) -> bytes:
    """The run file of the run under `key`, also of one that the store could not keep."""
    try:
        return backend.store().export_file(key)
    except ExplorerError:
        held = backend.records().get(key)
        if held is None:
            raise
        return run_file.write(run_file.stored_record(held))
