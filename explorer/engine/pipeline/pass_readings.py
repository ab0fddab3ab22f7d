"""Readings of one pass over a schedule: times of actions, calls of blocks, and bytes by rank.

Memory belongs to the rank that was acting at its allocation, whichever rank frees it: in one process ranks take turns,
so the windows of their actions show the rank. Parameters and buffers are older than the recording and are counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from explorer.engine.device.allocator import Probe, clock_skew_ns, lifetimes, take_probe
from explorer.engine.device.device import Device, Ticks
from explorer.engine.pipeline.build import Pipeline
from explorer.engine.policy.units import is_recomputing, observe_recompute
from explorer.plan.pipeline.actions import Action
from explorer.record.pipeline_run import ActionTime, BlockCalls, RankMemory, rank_memory


@dataclass
class CallCount:
    """Calls by fqn, and when each run for backward began and ended, on the clock of the actions."""

    forward: Counter[str] = field(default_factory=Counter)
    recompute: Counter[str] = field(default_factory=Counter)
    reruns: list[tuple[object, object]] = field(default_factory=list)

    def blocks(self, pipeline: Pipeline) -> tuple[BlockCalls, ...]:
        """Calls of each block of the stages, in order. A rerun of a unit inside a block counts for the block."""
        return tuple(
            BlockCalls(
                fqn=fqn,
                stage=part.stage,
                n_forward=self.forward[fqn],
                n_recompute=self._n_recompute(fqn, pipeline),
                n_microbatches=pipeline.n_microbatches,
            )
            for part in pipeline.parts
            for fqn in part.blocks
        )

    def _n_recompute(self, fqn: str, pipeline: Pipeline) -> int:
        scopes = {fqn, *(unit.blocks[0] for unit in pipeline.spec.policy.units if fqn in unit.blocks)}
        return max((n for name, n in self.recompute.items() if name in scopes or name.startswith(f"{fqn}.")), default=0)


class _Span(NamedTuple):
    action: Action
    start: object
    end: object
    first_rerun: int
    end_rerun: int
    """The runs for backward inside the action, by number."""


@dataclass
class PassReadings:
    """Marks of the actions, counted calls and recorded allocations of one pass.

    Marks of a GPU are in its stream and no call waits, so a rank computes while NCCL brings the next tensors. The
    GPU's wait for NCCL lies before the first mark of an action and is not part of the action.
    """

    pipeline: Pipeline
    clock: Ticks
    watch: MemoryWatch | None
    calls: CallCount = field(default_factory=CallCount)
    _spans: list[_Span] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Counts calls by hooks on the stages' blocks and on the policy's recompute scopes, without waiting for a GPU;
        records memory if there is a watch."""
        opened: dict[int, list[object]] = {}

        def forward(fqn: str, *_: object) -> None:
            if not is_recomputing():
                self.calls.forward[fqn] += 1

        def scope(fqn: str, entering: bool) -> None:
            begins = opened.setdefault(threading.get_ident(), [])
            if entering:
                self.calls.recompute[fqn] += 1
                begins.append(self.clock.mark())
            elif begins:
                begun = begins.pop()
                if not begins:
                    self.calls.reruns.append((begun, self.clock.mark()))

        with ExitStack() as stack:
            stack.enter_context(self.watch.recording() if self.watch else nullcontext())
            for fqn in (fqn for part in self.pipeline.parts for fqn in part.blocks):
                block = self.pipeline.trainee.model.get_submodule(fqn)
                stack.callback(block.register_forward_pre_hook(partial(forward, fqn)).remove)
            stack.enter_context(observe_recompute(scope))
            yield

    @contextmanager
    def outside(self, rank: int, name: str) -> Iterator[None]:
        """Allocations inside belong to `rank`, and to no action."""
        with self.watch.window(rank, name) if self.watch else nullcontext():
            yield

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Marks the begin and the end of an action of this pass."""
        with self.outside(self.pipeline.rank_of[action.stage], str(action)):
            first_rerun, start = len(self.calls.reruns), self.clock.mark()
            yield
            self._spans.append(_Span(action, start, self.clock.mark(), first_rerun, len(self.calls.reruns)))

    def prolong(self) -> None:
        """Moves the end of the last action to now."""
        self._spans[-1] = self._spans[-1]._replace(end=self.clock.mark())

    def times(self, zero: object) -> tuple[ActionTime, ...]:
        """Times of the actions since the mark `zero`, once the device has settled."""
        ms = self.clock.between_ms
        return tuple(
            ActionTime(
                rank=self.pipeline.rank_of[action.stage],
                stage=action.stage,
                kind=action.kind,  # type: ignore[arg-type]
                microbatch=action.microbatch,
                start_ms=ms(zero, start),
                end_ms=ms(zero, end),
                recompute_ms=sum(ms(begun, over) for begun, over in self.calls.reruns[first:last]),
            )
            for action, start, end, first, last in self._spans
        )

    def memory(self, ranks: Collection[int], times: tuple[ActionTime, ...]) -> tuple[RankMemory, ...]:
        """Bytes by rank, with `times` as the axis. Empty where this pass recorded none."""
        if self.watch is None:
            return ()
        pipeline = self.pipeline
        static = {rank: pipeline.static_bytes(rank) for rank in ranks}
        return self.watch.ranks(static, {rank: pipeline.receive_bytes(rank) for rank in ranks}, times)


class _Window(NamedTuple):
    """From `start_ns` to `end_ns` (Unix time) one rank did `name`."""

    start_ns: int
    end_ns: int
    rank: int
    name: str


class MemoryWatch:
    """Records allocations. `window` marks the acting rank."""

    def __init__(self, device: Device) -> None:
        self._windows: list[_Window] = []
        self._device = device.torch
        self._recorder = device.recorder()
        self._probes: list[Probe] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what is allocated inside."""
        with self._recorder:
            self._probe()
            try:
                yield
            finally:
                self._probe()

    def _probe(self) -> None:
        with suppress(Exception):  # a device without memory has none for a probe either, and the recording must end
            self._probes.append(take_probe(self._device, number=len(self._probes)))

    @contextmanager
    def window(self, rank: int, name: str) -> Iterator[None]:
        """Everything allocated inside belongs to `rank`."""
        start = time.time_ns()
        try:
            yield
        finally:
            self._windows.append(_Window(start, time.time_ns(), rank, name))

    def ranks(
        self, parameter_bytes: Mapping[int, int], receive_bytes: Mapping[int, int], times: tuple[ActionTime, ...]
    ) -> tuple[RankMemory, ...]:
        """A series per rank of `parameter_bytes`. Samples move from their window to the action's place in `times`."""
        log = self._recorder.log
        time_ns = log.time_ns - clock_skew_ns(log, tuple(self._probes))
        windows = sorted(self._windows)
        starts = np.array([window.start_ns for window in windows], dtype=np.int64)
        last_begun = np.searchsorted(starts, time_ns, side="right") - 1
        acting = np.array([*(window.rank for window in windows), -1])[last_begun]  # -1: before the first window
        spans = {(action.rank, action.name): (action.start_ms * 1e6, action.end_ms * 1e6) for action in times}
        lived = lifetimes(log)

        def samples(rank: int) -> Iterator[tuple[int, int, str]]:
            born, died = (events[acting[lived.born] == rank] for events in (lived.born, lived.died))
            deltas = np.zeros(len(log.n_bytes) + 1, dtype=np.int64)
            np.add.at(deltas, born, log.n_bytes[born])
            np.subtract.at(deltas, died, log.n_bytes[born])
            total, now = parameter_bytes[rank], 0
            yield now, total, ""
            for event in np.flatnonzero(deltas[:-1]):
                total += int(deltas[event])
                window = windows[last_begun[event]]
                span = spans.get((rank, window.name)) if window.rank == rank else None
                if span is not None:
                    share = (int(time_ns[event]) - window.start_ns) / max(window.end_ns - window.start_ns, 1)
                    now = max(now, round(span[0] + min(max(share, 0.0), 1.0) * (span[1] - span[0])))
                yield now, total, window.name if span is not None else ""

        return tuple(
            rank_memory(
                rank,
                "measured",
                tuple(samples(rank)),
                parameter_bytes=parameter_bytes[rank],
                receive_bytes=receive_bytes.get(rank, 0),
            )
            for rank in parameter_bytes
        )
