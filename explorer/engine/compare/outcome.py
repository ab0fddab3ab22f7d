"""The outcome of a run: everything that two runs are compared in, bit by bit.

    equal copies of parameters, buffers, optimizer; every generator seeded; gradients None
      ─▶ forward, backward ─▶ gradients, buffers, positions of the generators
      ─▶ optimizer, and more steps ─▶ parameters ─▶ output in eval mode

A user's step runs its optimizer itself: its buffers and generators are read after the optimizer.
A comparison has the outcomes of three or more runs, one of them in float64. In memory the outcomes were as large as
the largest run, so their tensors lie in a file and are read one by one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorer.engine.compare.diffs import Tensors
from explorer.engine.compare.programs import Program, follow, input_gradients, state_of, values_of
from explorer.engine.state.bits import dense, same_bits
from explorer.engine.state.rng import RngState
from explorer.engine.state.state_diff import State, StateKey, same_state
from explorer.record.comparison import RngDiff

DISK = Path("/var/tmp")
"""Default folder, on a disk by custom while /tmp may lie in memory; TMPDIR overrides it."""

SMALL_BYTES = 4096
"""Tensors up to this size stay in memory: most of a model's tensors, and little of its bytes."""
N_STEPS = 2
"""Optimizer steps before parameters are compared: the second step starts from moved weights and statistics."""

EVAL_OUTPUT = "output in eval mode"


class _File:
    """A file without a name, which is deleted with the last reference to a tensor in it."""

    def __init__(self) -> None:
        folder = DISK if "TMPDIR" not in os.environ and os.access(DISK, os.W_OK) else None
        self.open: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def __del__(self) -> None:
        if hasattr(self, "open"):
            self.open.close()


@dataclass(frozen=True)
class _Extent:
    file: _File
    offset: int
    n_bytes: int
    dtype: torch.dtype
    shape: torch.Size


class TensorsOnDisk(Mapping[str, Tensor | None]):
    """Tensors by name; every read returns a detached copy on the CPU."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor | None]], like: Tensors | None = None) -> None:
        """Writes `tensors`, except tensors that equal those of `like` bit by bit: both share one extent."""
        self._file: _File | None = None
        self._end = 0
        self._extents: dict[str, _Extent | Tensor | None] = {}
        for name, tensor in tensors:
            self._extents[name] = None if tensor is None else self._put(name, dense(tensor), like or {})

    def __getitem__(self, name: str) -> Tensor | None:
        extent = self._extents[name]
        if not isinstance(extent, _Extent):
            return extent
        buffer = np.empty(extent.n_bytes, dtype=np.uint8)
        _transfer(os.preadv, extent.file, buffer, extent.offset)
        return torch.from_numpy(buffer).view(extent.dtype).reshape(extent.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._extents)

    def __len__(self) -> int:
        return len(self._extents)

    def _put(self, name: str, tensor: Tensor, like: Tensors) -> _Extent | Tensor | None:
        earlier = like.get(name)
        if isinstance(like, TensorsOnDisk) and earlier is not None and same_bits(earlier, tensor):
            return like._extents[name]
        if tensor.nbytes <= SMALL_BYTES:
            return tensor.clone()
        try:
            return self._write(tensor)
        except OSError:  # a full disk: memory may still have room
            return tensor.clone()

    def _write(self, tensor: Tensor) -> _Extent:
        if self._file is None:
            self._file = _File()
        content = _bytes_of(tensor)
        extent = _Extent(self._file, self._end, content.nbytes, tensor.dtype, tensor.shape)
        _transfer(os.pwritev, self._file, content, self._end)
        self._end += content.nbytes
        return extent


def _transfer(call: Callable[..., int], file: _File, array: Any, offset: int) -> None:
    """Reads or writes all of `array` at `offset`: a model that forks shares the file's position with its copy."""
    rest, fd = memoryview(array), file.open.fileno()
    while rest.nbytes:
        n_bytes = call(fd, [rest], offset)
        if not n_bytes:
            raise OSError("A file of tensors ended before the last one.")
        rest, offset = rest[n_bytes:], offset + n_bytes


def _bytes_of(tensor: Tensor) -> Any:
    """The bytes of a dense tensor as a numpy array."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def fingerprint(tensor: Tensor) -> bytes:
    """Hash of a tensor's bytes, 32 bytes long."""
    return hashlib.blake2b(_bytes_of(dense(tensor)), digest_size=32).digest()


@dataclass
class Outcome:
    """Results of one run, by full name."""

    gradients: Tensors = field(default_factory=dict)
    input_gradients: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    rng: dict[str, bytes] = field(default_factory=dict)
    """Positions of the generators after the first backward."""
    draws: bool = False
    """Whether the first step moved any generator."""
    loss: float | None = None
    states: list[State] = field(default_factory=list)
    """State of the model after the first step's backward and after the last step."""
    moved: Tensors = field(default_factory=dict)
    """Parameters that forward or backward moved, before any optimizer; of a user's step only if no gradient is left,
    because an optimizer inside backward used it."""
    trained: frozenset[str] = frozenset()
    """Names of the parameters that require a gradient."""
    n_steps: int = 0
    stepped: bool | None = None
    """Whether an optimizer of torch stepped inside a user's step; None for the step of a RunSpec."""
    led: bool = False
    """Whether the optimizers of this run got the gradients of the run `lead`."""
    later_gradients: Tensors = field(default_factory=dict)
    after: list[Tensors] = field(default_factory=list)
    """All parameters after each step; of a run with a `lead`, after the last step only."""
    eval_output: Tensor | None = None

    @property
    def parameters(self) -> Tensors:
        """After the last step."""
        return self.after[-1] if self.after else {}


def outcome_of(
    program: Program,
    *,
    full: bool = True,
    lead: Outcome | None = None,
    like: Outcome | None = None,
    evaluates: bool = True,
) -> Outcome:
    """Outcome of a started program after one step; if `full` after N_STEPS, and of its output if it also `evaluates`.
    The run is ended.

    If the gradients differ from those of `lead`, each further step starts from the parameters of `lead`. AdamW makes a
    whole step of a gradient that is zero but for rounding, which would spoil the comparison of all later steps.
    `like` is an outcome that is probably equal: equal tensors share its place on disk, but it leads no step.
    Errors of the model pass through.
    """
    earlier = lead or like or Outcome()
    before = {name: fingerprint(value) for name, value in values_of(program).items()}
    positions = RngState.capture(program.model).positions()
    loss = program.take_step(lead.gradients if lead else {})
    outcome = Outcome(
        gradients=TensorsOnDisk(program.gradients().items(), earlier.gradients),
        input_gradients=TensorsOnDisk(input_gradients(program.batches), earlier.input_gradients),
        buffers=TensorsOnDisk(program.buffers().items(), earlier.buffers),
        rng=RngState.capture(program.model).positions(),
        loss=loss,
        states=[state_of(program)],
        trained=frozenset(name for name, parameter in program.named().items() if parameter.requires_grad),
    )
    outcome.draws = any(position != positions.get(name, position) for name, position in outcome.rng.items())
    if program.stepped is None or not any(gradient is not None for gradient in program.gradients().values()):
        values = values_of(program).items()
        outcome.moved = TensorsOnDisk((name, value) for name, value in values if before.get(name) != fingerprint(value))
    if full:
        _train_on(program, outcome, lead, earlier)
        outcome.eval_output = program.eval_output() if evaluates else None
    program.end()
    return outcome


def _train_on(program: Program, outcome: Outcome, lead: Outcome | None, earlier: Outcome) -> None:
    """Runs the further steps. Without an optimizer a step is forward and backward alone, which still moves state."""
    follows = lead is not None and not (program.stepped is None and same_gradients(lead, outcome))
    for i in range(N_STEPS):
        if i:
            program.take_step(lead.later_gradients if lead else {})
            outcome.later_gradients = TensorsOnDisk(program.gradients().items(), earlier.later_gradients)
        program.optimize()
        if lead is None or i == N_STEPS - 1:
            like = earlier.after[i] if earlier.after else None
            outcome.after.append(TensorsOnDisk(values_of(program).items(), like))
        if lead is not None and follows:
            follow(program, lead.after[i])
    outcome.n_steps = N_STEPS
    outcome.states.append(state_of(program))
    outcome.stepped = program.stepped
    outcome.led = lead is not None and bool(lead.stepped and outcome.stepped)


def rng_differences(baseline: Outcome, candidate: Outcome) -> tuple[RngDiff, ...]:
    """Differences of the generators after one backward. Generators of one run alone (a late import) are left out."""
    both = [name for name in baseline.rng if name in candidate.rng]
    return tuple(RngDiff(generator=name, equal=baseline.rng[name] == candidate.rng[name]) for name in both)


def not_reproducible_because(first: Outcome, second: Outcome) -> str:
    """One sentence with the tensors in which two runs of one program differ; empty if all bits are equal."""
    families = {
        "gradients": "gradients",
        "gradients of the inputs": "input_gradients",
        "gradients of the last step": "later_gradients",
        "buffers": "buffers",
        "parameters": "parameters",
    }
    parts = []
    for words, family in families.items():
        left, right = getattr(first, family), getattr(second, family)
        unequal = [name for name in left if not _same(left[name], right.get(name))]
        if unequal:
            parts.append(f"{len(unequal)} of {len(left)} {words} ({_some(unequal)})")
    if not _same(first.eval_output, second.eval_output):
        parts.append(f"the {EVAL_OUTPUT}")
    if generators := [diff.generator for diff in rng_differences(first, second) if not diff.equal]:
        parts.append(f"the position of {_some(generators)}")
    return f"Two runs of the baseline from the same state and seed differ in {', '.join(parts)}." if parts else ""


def unstable(first: Outcome, second: Outcome) -> frozenset[StateKey]:
    """Attributes and buffers in which two runs of one program differ after any step."""
    return frozenset(key for left, right in zip(first.states, second.states) for key in unequal_state(left, right))


def unequal_state(left: State, right: State) -> list[StateKey]:
    """Attributes and buffers that differ, or that one side lacks."""
    return [key for key in {**left, **right} if not same_state(left.get(key), right.get(key))]


def same_gradients(one: Outcome, other: Outcome) -> bool:
    """Whether all gradients of the first backward are equal in every bit."""
    return all(_same(one.gradients.get(name), gradient) for name, gradient in other.gradients.items())


def same_output(one: Outcome, other: Outcome) -> bool:
    """Whether the outputs in eval mode are equal in every bit."""
    return _same(one.eval_output, other.eval_output)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else same_bits(left, right)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
