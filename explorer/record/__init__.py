"""Frozen records of plain values, without tensors, modules or figures. base.py defines a record."""

# ruff: noqa: F401 (the names that others import from here)

from explorer.record.allocations import PHASES, ROLES, Allocations, Calls, Phase, PhaseSpan, Role
from explorer.record.base import Origin, Record
from explorer.record.comparison import (
    BufferDiff,
    Comparison,
    GradientDiff,
    MaskDiff,
    ParameterDiff,
    RngDiff,
    StateChange,
    StateDiff,
    TensorDiff,
    Verdict,
)
from explorer.record.failure import Failure
from explorer.record.graph import Block, CutPoint, Edge, Hazard, Join, ModelGraph, ModelRef, Trait
from explorer.record.late_read import LateRead
from explorer.record.measurement import AllocatorPeaks, Environment, MeasuredBlock, Measurement, Samples, Times
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import CheckpointMode, PipelinePlan, RunSpec
