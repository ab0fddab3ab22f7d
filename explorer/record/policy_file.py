"""What a policy file says: the decision, the model it was made for, and the evidence behind it."""

from __future__ import annotations

from explorer.record.base import Record
from explorer.record.diffs import Verdict
from explorer.record.graph import ModelRef
from explorer.record.pipeline_plan import PipelinePlan
from explorer.record.policy import Policy


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
    """The whole file. `fingerprint` is that of the model's graph, `blocks` counts its names, see plan/policy/shape.py;
    None or empty: the file does not say."""

    policy: Policy
    model: ModelRef | None = None
    fingerprint: str | None = None
    blocks: dict[str, int] = {}
    pipeline: PipelinePlan | None = None
    evidence: Evidence | None = None
