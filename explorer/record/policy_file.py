"""A policy on its way into and out of the program: the policy file, an export to a target, and a text that was read."""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Record
from explorer.record.comparison import Verdict
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan


class Evidence(Record):
    """What was measured when the policy was made. None: not measured."""

    device: str
    """Name of the device, such as the CPU's or GPU's model."""
    torch_version: str
    input_shapes: tuple[tuple[int, ...], ...] = ()
    step_peak_bytes: int | None = None
    baseline_step_peak_bytes: int | None = None
    saved_after_forward_bytes: int | None = None
    baseline_saved_after_forward_bytes: int | None = None
    time_ratio: float | None = None
    """Step time of the policy over step time without it."""
    time_ratio_spread: float | None = None
    flop_ratio: float | None = None
    baseline_policy: Policy | None = None
    """What the run that it was compared with recomputed; None: that kept everything."""
    verdict: Verdict | None = None
    """Whether gradients, buffers and RNG stayed the same."""


class PolicyFile(Record):
    """The whole file. `fingerprint` is that of the graph, `blocks` counts its names (plan/policy/block_names.py);
    None or empty: the file does not say."""

    policy: Policy
    model: ModelRef | None = None
    fingerprint: str | None = None
    blocks: dict[str, int] = {}
    pipeline: PipelinePlan | None = None
    evidence: Evidence | None = None


Fit = Literal["exact", "approximated", "not expressible"]
Checked = Literal["executed", "grammar"]
"""executed: a test runs the export and counts the blocks that ran again. grammar: held against its documents."""


class Export(Record):
    """One policy file in one form."""

    target: str
    written_for: str
    """Program and version: `transformers 5.23`."""
    fit: Fit = "exact"
    text: str = ""
    """What is written; empty where it is not expressible."""
    recomputed: tuple[str, ...] | None = None
    """Blocks that the target will recompute; None: the form says nothing of single blocks."""
    missing: tuple[str, ...] = ()
    """Blocks that the policy recomputes and the target does not."""
    extra: tuple[str, ...] = ()
    """Blocks that the target recomputes and the policy does not."""
    reasons: tuple[str, ...] = ()
    """Why it is not exact."""
    notes: tuple[str, ...] = ()
    """Notes for the user of the export."""
    checked: Checked = "grammar"
    as_run: Policy | None = None
    """What the target will really do, as a policy that can be measured; None: no blocks can be named."""


class Reading(Record):
    """What a text says, and what became of it on the way. What cannot be said as a policy at all is an error."""

    source: str
    """`a policy file`, or program and version: `transformers 5.23`."""
    file: PolicyFile
    """With the model's own names."""
    fit: Fit = "exact"
    reasons: tuple[str, ...] = ()
    """Why it is approximated: what the program does that the policy does not."""
    changed: str = ""
    """How the model differs from the one that a policy file was made for."""
    notes: tuple[str, ...] = ()
    """What patterns stand for, which layers were counted, options that differ there and change no gradient."""

    @property
    def policy(self) -> Policy:
        return self.file.policy

    @property
    def told(self) -> tuple[str, ...]:
        """Everything that a person has to know of it. Empty: a policy file that was made for this very model."""
        return (*self.reasons, *((self.changed,) if self.changed else ()), *self.notes)
