"""Policies entering and leaving the program: the policy file, an export to a target, and a text that was read."""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Record
from explorer.record.comparison import Verdict
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.ranks import Ranks
from explorer.record.run import PipelinePlan


class Evidence(Record):
    """Figures measured when the policy was made. None: not measured."""

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
    """Policy of the baseline run; None: the baseline kept everything."""
    verdict: Verdict | None = None
    """The verdict on gradients, buffers and RNG."""


class PolicyFile(Record):
    """The whole file. `fingerprint` belongs to the graph, `blocks` counts its names (plan/policy/block_names.py).
    None or empty: absent from the file."""

    policy: Policy
    model: ModelRef | None = None
    fingerprint: str | None = None
    blocks: dict[str, int] = {}
    pipeline: PipelinePlan | None = None
    ranks: Ranks | None = None
    """The split that the policy was planned for."""
    evidence: Evidence | None = None


Fit = Literal["exact", "approximated", "not expressible"]
Checked = Literal["executed", "grammar"]
"""executed: a test runs the export and counts the blocks that ran again. grammar: held against its documents."""


class Export(Record):
    """A policy file in the form of a target."""

    target: str
    written_for: str
    """Program and version: `transformers 5.23`."""
    fit: Fit = "exact"
    text: str = ""
    """The exported text; empty if the policy is not expressible."""
    recomputed: tuple[str, ...] | None = None
    """Blocks that the target will recompute; None: the form names no single blocks."""
    missing: tuple[str, ...] = ()
    """Blocks that the policy recomputes and the target does not."""
    extra: tuple[str, ...] = ()
    """Blocks that the target recomputes and the policy does not."""
    reasons: tuple[str, ...] = ()
    """Why the export is not exact."""
    notes: tuple[str, ...] = ()
    """Notes for the user of the export."""
    checked: Checked = "grammar"
    as_run: Policy | None = None
    """The behaviour of the target as a policy that can be measured; None: no blocks can be named."""


class Reading(Record):
    """A policy read from a text, and the losses of reading. A text that no policy can express is an error."""

    source: str
    """`a policy file`, or program and version: `transformers 5.23`."""
    file: PolicyFile
    """The policy file with names of the model."""
    fit: Fit = "exact"
    reasons: tuple[str, ...] = ()
    """Why the policy is approximated: the differences between the program and the policy."""
    changed: str = ""
    """Differences between the model and the model that the policy file was made for."""
    notes: tuple[str, ...] = ()
    """Blocks behind patterns, counted layers, and different options that change no gradient."""

    @property
    def policy(self) -> Policy:
        return self.file.policy

    @property
    def messages(self) -> tuple[str, ...]:
        """All messages for a person. Empty for a policy file that was made for this model."""
        return (*self.reasons, *((self.changed,) if self.changed else ()), *self.notes)
