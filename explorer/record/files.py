"""Documents that enter and leave the program: the policy file, an export, a text that was read, and the lock of a step.

A `Lock` holds predicted figures of a step for a repository. A `Move` is one difference between two locks, in words.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from explorer.record.base import Count, Record
from explorer.record.comparison import Verdict
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan, Ranks, RunSpec

RUN_MAGIC = b"checkpoint-explorer run\n"
"""First bytes of a run file."""


class Evidence(Record):
    """Figures measured when the policy was made. None: not measured."""

    device: str
    torch_version: str
    input_shapes: tuple[tuple[int, ...], ...] = ()
    step_peak_bytes: int | None = None
    baseline_step_peak_bytes: int | None = None
    saved_after_forward_bytes: int | None = None
    baseline_saved_after_forward_bytes: int | None = None
    time_ratio: float | None = None
    time_ratio_spread: float | None = None
    flop_ratio: float | None = None
    baseline_policy: Policy | None = None
    """Policy of the baseline run; None: the baseline kept everything."""
    verdict: Verdict | None = None


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


Fit = Literal["exact", "approximated"]


class Export(Record):
    """A policy file in the form of a target."""

    target: str
    written_for: str
    """Program and version: `transformers 5.23`."""
    fit: Fit = "exact"
    text: str = ""
    recomputed: tuple[str, ...] | None = None
    """Blocks that the target will recompute; None: the form names no single blocks."""
    missing: tuple[str, ...] = ()
    """Blocks that the policy recomputes and the target does not."""
    reasons: tuple[str, ...] = ()
    """Why the export is not exact."""
    notes: tuple[str, ...] = ()
    as_run: Policy | None = None
    """The behaviour of the target as a policy that can be measured; None: no blocks can be named."""


class Reading(Record):
    """A policy file as it is read on a model."""

    file: PolicyFile
    """The policy file with names of the model."""
    changed: str = ""
    """Differences between the model and the model that the policy file was made for."""
    notes: tuple[str, ...] = ()
    """Blocks behind patterns."""

    @property
    def policy(self) -> Policy:
        return self.file.policy

    @property
    def messages(self) -> tuple[str, ...]:
        """All messages for a person. Empty for a policy file that was made for this model."""
        return (*((self.changed,) if self.changed else ()), *self.notes)


MoveKind = Literal[
    "conditions",  # the locks are of other models, policies or settings
    "inputs",  # shapes of the batch
    "dtype",  # types of the parameters
    "block added",
    "block removed",
    "block replaced",  # another class under the same name
    "parameters",  # bytes of a block's parameters
    "forward calls",
    "checkpoint lost",
    "checkpoint added",
    "reruns",  # a block runs again more or less often
    "collectives",  # a block of a rank calls more or fewer of a kind, or larger ones
    "results",  # operators of a block allocate or keep other results
    "totals",  # figures of the whole step, last
]
"""Causes come before consequences."""


class OperatorBytes(Record, omit_defaults=True):
    """Results that one operator allocates in one block."""

    n: Count
    n_bytes: Count
    saved_bytes: Count = 0
    """Part of `n_bytes` that is kept for backward."""


class CollectiveBytes(Record):
    """Collectives of one kind: calls, and the bytes of the whole tensors that they gather or reduce."""

    n: Count
    n_bytes: Count


class LockedBlock(Record, omit_defaults=True):
    """Figures of one block: sums over its calls. Bytes and FLOPs include blocks inside, operators do not."""

    kind: str = ""
    n_forward: Count = 1
    n_recompute: Count = 0
    parameter_bytes: Count = 0
    saved_bytes: Count = 0
    """Saved activations after forward."""
    forward_flops: Count = 0
    recompute_flops: Count = 0
    backward_flops: Count = 0
    in_place: dict[str, Count] = {}
    """Calls in forward of operators that write into their arguments."""
    operators: dict[str, OperatorBytes] = {}
    """By phase, operator and type: `forward aten.gelu.default float32`. Recomputes are left out."""
    collectives: dict[str, CollectiveBytes] = {}
    """By phase and kind: `backward all-gather`. Blocks inside are not included."""
    same_as: str = ""
    """An earlier sibling with equal figures, blocks inside included; then no other field is set."""


class LockedStep(Record):
    """Figures of the whole step. Origin: predicted."""

    peak_bytes: Count
    peak_phase: str
    saved_bytes: Count
    forward_flops: Count
    recompute_flops: Count
    backward_flops: Count
    at_peak: dict[str, Count] = {}
    """Bytes at the peak by role; roles without bytes are left out."""
    card_allocated_bytes: Count | None = None
    """Peak on the card of the run, by the rules of torch's allocator; None: no card."""
    card_reserved_bytes: Count | None = None
    rank: Count | None = None
    """The fullest rank, whose figures these are; None: one process."""
    collectives: dict[str, CollectiveBytes] = {}
    """Of that rank, by kind: `all-gather`."""


class Lock(Record, kw_only=True):
    """The predicted figures of one step, and everything that is needed to predict them again."""

    version: Annotated[int, Meta(ge=1, le=1)] = 1
    packages: dict[str, str]
    """Versions that decide which operators run: explorer, torch."""
    policy: str
    """Name of a preset, a pattern or a file, as given."""
    run: RunSpec
    """Model and conditions, with an empty policy."""
    inputs: tuple[str, ...] = ()
    """Shapes of the batch: `8x128`."""
    dtype: str = ""
    """Types of the parameters."""
    step: LockedStep
    blocks: dict[str, LockedBlock]
    """By fqn; the empty string is the model."""


class Move(Record):
    """One difference between two locks."""

    kind: MoveKind
    blocks: tuple[str, ...]
    """Blocks in which it happened; empty: the whole step."""
    sentence: str
    n_bytes: int = 0
    """Change of saved or allocated bytes, summed over the blocks; 0 if bytes are not what moved."""
