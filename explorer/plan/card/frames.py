"""From stacks of a recorded history to its timeline: phase, module and source line of every request.

A stack shows where memory was requested. Phases follow from frames of torch; the innermost that says one counts:

recompute   torch/utils/checkpoint.py: `unpack_hook`, `recompute_fn`, and `backward` of the reentrant form
backward    autograd's engine, or a function of the name `backward`
optimizer   torch/optim, or the profiler's range `Optimizer.step`
forward     a call of a module, or an operator in a trace without Python's stack, without any of the frames above

A request without Python frames comes from autograd's thread. Frees belong to the phase around them. A module is named
by the lines from which modules are called, outermost first: `gpt:88.block:31.linear`. A profiler has `GPT_0.Linear_3`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import NamedTuple

from explorer.plan.card.snapshot import LONGEST_NAME, Stack, StackFrame
from explorer.record.allocations import ROLES, Allocations, Phase, PhaseSpan
from explorer.record.base import column
from explorer.record.graph import RECORDED, ModelRef
from explorer.record.measurement import AllocatorPeaks, Environment, Measurement
from explorer.record.run import Device, RunSpec

MODULE_FILE = "nn.Module"
"""In place of a file: the frame is a module that the profiler names."""
CPU_LABEL = "CPU"
MOST_LABELS = 4096
OTHERS = "others"
_RERUNS = {"unpack_hook", "recompute_fn", "inner_unpack", "backward"}
_CALLS = {"_call_impl", "_wrapped_call_impl"}
_ENGINE = ("torch::autograd::Engine", "autograd::engine::evaluate_function")


class Scene(NamedTuple):
    """What a stack says; the phase is None if it says none, names are empty if there are none."""

    phase: Phase | None
    module: str
    line: str


class HistoryMove(NamedTuple):
    """A request, or a completed free with negative bytes."""

    address: int
    n_bytes: int
    stack: int
    time_us: float


@dataclass(kw_only=True)
class Movements:
    """What moved on one device."""

    older: list[HistoryMove] = field(default_factory=list)
    """Blocks that were there before the first event."""
    moves: list[HistoryMove] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    """Bytes before the first event and after each; empty: not recorded."""
    reserved: list[int] = field(default_factory=list)


def scene_of(stack: Stack) -> Scene:
    """Phase, module and source line of a stack."""
    phase = next((phase for phase in map(_phase_of, stack) if phase), None)
    python = [frame for frame in stack if frame.file.endswith(".py") or frame.file.startswith("<")]
    modules = _modules(stack, python)
    if phase is None and (modules or (stack and not python)):  # an operator by itself: a trace without Python's stack
        phase = "forward"
    elif phase is None and python:
        phase = "between"
    operator = next((frame.name for frame in stack if not frame.file), "")  # as the profiler names it
    line = next((_line(frame) for frame in python if not _is_torch(frame)), operator)
    return Scene(phase, ".".join(modules)[-LONGEST_NAME:], line[-LONGEST_NAME:])


@lru_cache(maxsize=1 << 16)
def _phase_of(frame: StackFrame) -> Phase | None:
    if frame.file.endswith("torch/utils/checkpoint.py") and frame.name in _RERUNS:
        return "recompute"
    if frame.name in ("backward", "_engine_run_backward") or any(name in frame.name for name in _ENGINE):
        return "backward"
    if "torch/optim/" in frame.file or frame.name.startswith("Optimizer.step"):
        return "optimizer"
    return None


def _modules(stack: Stack, python: Sequence[StackFrame]) -> list[str]:
    """Modules that were running, outermost first."""
    if named := [frame.name.replace(".", "_") for frame in reversed(stack) if frame.file == MODULE_FILE]:
        return named
    calls = [
        frame
        for frame, caller in zip(python, python[1:])
        if caller.name in _CALLS and frame.name not in _CALLS and caller.file.endswith("nn/modules/module.py")
    ]
    stems = [PurePath(frame.file).stem.replace(".", "_") for frame in calls]
    inner = [f"{stem}:{frame.line}" for stem, frame in zip(stems[1:], calls[1:])]
    return [*reversed(inner), *stems[:1]]


def _is_torch(frame: StackFrame) -> bool:
    file = frame.file
    return "/torch/" in file or file.startswith(("torch/", "<frozen")) or file.endswith("contextlib.py")


def _line(frame: StackFrame) -> str:
    """`cs336/model.py:52 forward`"""
    return f"{'/'.join(PurePath(frame.file).parts[-2:])}:{frame.line} {frame.name}"


def timeline_of(movements: Movements, stacks: Sequence[Stack], file: str, device: str) -> Measurement:
    """The movements as a run: an entry a block, a tick an event. `device` is its name."""
    scenes = [scene_of(stack) for stack in stacks]
    if any(stacks):
        scenes[0] = scenes[0]._replace(phase="backward")
    kind: Device = "cpu" if device == CPU_LABEL else "cuda"
    times = [move.time_us for move in movements.moves]
    allocations = _allocations(movements, scenes, times if all(times) else [])
    has_curves = len(movements.reserved) == allocations.n_ticks + 1
    allocated, reserved = column(movements.allocated), column(movements.reserved)
    return Measurement(
        spec=RunSpec(model=ModelRef(target=f"{RECORDED}{file}"), device=kind),
        environment=Environment(
            device=kind, device_name=device, torch_version="", python_version="", platform="", n_threads=0
        ),
        origin="recorded",
        allocations=allocations,
        phases=_phases(movements, scenes),
        peaks=AllocatorPeaks(allocated=allocated, reserved=reserved) if has_curves else AllocatorPeaks(),
        recorded_in=file,
    )


def _allocations(movements: Movements, scenes: Sequence[Scene], times_us: Sequence[float]) -> Allocations:
    end = len(movements.moves) + 1
    n_bytes: list[int] = []
    born: list[int] = []
    died: list[int] = []
    stack: list[int] = []
    alive: dict[int, int] = {}
    for tick, move in (*((0, move) for move in movements.older), *enumerate(movements.moves, 1)):
        entry = alive.pop(move.address, None)
        if entry is not None:
            died[entry] = tick
        if move.n_bytes > 0 or entry is None:  # a free of a block that is not known: it was there before
            if move.n_bytes > 0:
                alive[move.address] = len(n_bytes)
            n_bytes.append(abs(move.n_bytes))
            born.append(tick if move.n_bytes > 0 else 0)
            died.append(end if move.n_bytes > 0 else tick)
            stack.append(move.stack if move.n_bytes > 0 else 0)
    module_of, modules = _numbered(scene.module for scene in scenes)
    line_of, lines = _numbered(scene.line for scene in scenes)
    first = times_us[0] if times_us else 0
    return Allocations(
        n_ticks=end - 1,
        n_bytes=column(n_bytes),
        born=column(born),
        died=column(died),
        role=column([ROLES.index("unattributed")] * len(born)),
        block=column(module_of[number] for number in stack),
        op=column(line_of[number] for number in stack),
        blocks=modules,
        ops=lines,
        time_ns=column([0, *(max(0, round((time - first) * 1000)) for time in times_us)] if times_us else ()),
    )


def _numbered(names: Iterable[str]) -> tuple[list[int], tuple[str, ...]]:
    """The number of each name, and the names by number. The empty name is 0; names beyond a bound share one."""
    numbers = {"": 0}
    indices = []
    for name in names:
        label = name if name in numbers or len(numbers) < MOST_LABELS else OTHERS
        indices.append(numbers.setdefault(label, len(numbers)))
    return indices, tuple(numbers)


def _phases(movements: Movements, scenes: Sequence[Scene]) -> tuple[PhaseSpan, ...]:
    """Phases in ticks, without gaps. Events before the first known phase belong to it."""
    spans: list[tuple[Phase, int]] = []
    for tick, move in enumerate(movements.moves, 1):
        phase = scenes[move.stack].phase
        if move.n_bytes > 0 and phase is not None and (not spans or spans[-1][0] != phase):
            spans.append((phase, tick if spans else 0))
    ends = [first for _, first in spans[1:]] + [len(movements.moves) + 1]
    return tuple(
        PhaseSpan(phase=phase, block="", first_tick=first, end_tick=end) for (phase, first), end in zip(spans, ends)
    )
