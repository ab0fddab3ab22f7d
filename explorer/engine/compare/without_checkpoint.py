"""The step of a model that checkpoints itself, run with that turned off: the third side of a comparison.

Baseline and candidate both contain the model's own checkpoints. A difference of the two does not show which side is
wrong, and two sides that are wrong alike show no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from msgspec.structs import replace
from torch.nn.modules.module import register_module_forward_pre_hook

from explorer.engine.compare.carried import state_differences
from explorer.engine.compare.diffs import differences
from explorer.engine.compare.outcome import Outcome, Yardsticks, outcome_of
from explorer.engine.compare.programs import SpecProgram
from explorer.engine.policy.apply import SWITCHES, checkpointing_off
from explorer.engine.state.state_diff import StateKey
from explorer.record.checkpointing import WithoutCheckpoint
from explorer.record.comparison import BufferDiff, GradientDiff, TensorDiff
from explorer.record.policy import KEEP_ALL


def outcome_without_checkpoint(baseline: SpecProgram, base: Outcome) -> Outcome | None:
    """The outcome of the step without policy and own checkpoints. None if it fails or blocks still run again."""
    program = baseline.under(replace(baseline.spec, policy=KEEP_ALL, plan=None)).start()
    reruns: list[str] = []

    def look(module: torch.nn.Module, args: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            reruns.append(type(module).__name__)

    try:
        with checkpointing_off(program.model), register_module_forward_pre_hook(look):
            outcome = outcome_of(program, lead=base, evaluates=False)
    except Exception:  # the verdict does not need this evidence
        return None
    return None if reruns else outcome


def sides_against(
    plain: Outcome, runs: tuple[Outcome, Outcome], yardsticks: Yardsticks, unjudged: Collection[StateKey]
) -> WithoutCheckpoint:
    """The names in which baseline and candidate differ from `plain` by more than rounding."""
    of_switches = {key for state in plain.states for key in state if key[1] in SWITCHES}
    left_out = {*unjudged, *of_switches}
    names = [dict.fromkeys(_differing(plain, run, yardsticks, left_out)) for run in runs]
    base = runs[0].gradients
    lost = tuple(name for name, gradient in plain.gradients.items() if gradient is not None and base.get(name) is None)
    return WithoutCheckpoint(baseline=tuple(names[0]), candidate=tuple(names[1]), lost=lost)


def _differing(plain: Outcome, run: Outcome, yardsticks: Yardsticks, left_out: Collection[StateKey]) -> Iterator[str]:
    diffs: list[TensorDiff] = [
        *differences(GradientDiff, plain.gradients, run.gradients, yardsticks.of("gradients")),
        *differences(BufferDiff, plain.buffers, run.buffers, yardsticks.of("buffers")),
        *state_differences(plain, run, yardsticks, left_out),
    ]
    yield from (diff.name for diff in diffs if diff.verdict == "different")
