"""Readings of one pass over a schedule: times of actions, calls of blocks, and bytes by rank.

Memory belongs to the rank that was acting at its allocation, whichever rank frees it: in one process ranks take turns,
so the times of their actions show the rank. Parameters and buffers are older than the recording and are counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from explorer.engine.device.allocator import Probe, clock_skew_ns, lifetimes, take_probe
from explorer.engine.device.device import Device, Ticks
from explorer.engine.policy.units import is_recomputing, observe_recompute
from explorer.pipeline.engine.build import Pipeline
from explorer.pipeline.plan.actions import Action
from explorer.pipeline.record.step import ActionTime, BlockCalls, RankMemory


@dataclass
class CallCount:
    """Calls by fqn, and when each run for backward began and ended, on the clock of the actions."""

    forward: Counter[str] = field(default_factory=Counter)
    recompute: Counter[str] = field(default_factory=Counter)
    reruns: list[tuple[object, object]] = field(default_factory=list)

    def blocks(self, pipeline: Pipeline) -> tuple[BlockCalls, ...]:
        """Calls of each block of the stages, in order. A rerun of a unit inside a block counts for the block."""
        calls = []
        for fqn, stage in ((fqn, part.stage) for part in pipeline.parts for fqn in part.blocks):
            scopes = {fqn, *(unit.blocks[0] for unit in pipeline.spec.policy.units if fqn in unit.blocks)}
            reruns = [n for name, n in self.recompute.items() if name in scopes or name.startswith(f"{fqn}.")]
            counts = {"n_forward": self.forward[fqn], "n_recompute": max(reruns, default=0)}
            calls.append(BlockCalls(fqn=fqn, stage=stage, n_microbatches=pipeline.n_microbatches, **counts))
        return tuple(calls)


class Span(NamedTuple):
    """What one rank did between two marks of the clock."""

    rank: int
    name: str
    start: Any
    end: Any
    action: Action | None = None
    """None: outside of actions, in a pass that records memory."""
    reruns: slice = slice(0)
    """The runs for backward inside the action, by number."""


@dataclass
class PassReadings:
    """Marks of the actions, counted calls and recorded allocations of one pass.

    A pass with a `watch` needs a WallClock, because allocators tell the time of day. Marks of a GPU are in its stream
    and no call waits, so a rank computes while NCCL brings the next tensors. The GPU's wait for NCCL lies before the
    first mark of an action and is not part of the action.
    """

    pipeline: Pipeline
    clock: Ticks
    watch: MemoryWatch | None = None
    calls: CallCount = field(default_factory=CallCount)
    _spans: list[Span] = field(default_factory=list)

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
        """Allocations inside belong to `rank`, and to no action unless one begins."""
        start = self.clock.mark()
        yield
        self._spans.append(Span(rank, name, start, self.clock.mark()))

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Marks the begin and the end of an action of this pass."""
        first_rerun, start = len(self.calls.reruns), self.clock.mark()
        yield
        end, reruns = self.clock.mark(), slice(first_rerun, len(self.calls.reruns))
        self._spans.append(Span(self.pipeline.rank_of[action.stage], str(action), start, end, action, reruns))

    def prolong(self) -> None:
        """Moves the end of the last action to now."""
        self._spans[-1] = self._spans[-1]._replace(end=self.clock.mark())

    def times(self, zero: object) -> tuple[ActionTime, ...]:
        """Times of the actions since the mark `zero`, once the device has settled."""
        ms = self.clock.between_ms
        return tuple(
            ActionTime(
                rank=span.rank,
                stage=span.action.stage,
                kind=span.action.kind,  # type: ignore[arg-type]
                microbatch=span.action.microbatch,
                start_ms=ms(zero, span.start),
                end_ms=ms(zero, span.end),
                recompute_ms=sum(ms(begun, over) for begun, over in self.calls.reruns[span.reruns]),
            )
            for span in self._spans
            if span.action is not None
        )

    def memory(self, ranks: Collection[int], times: tuple[ActionTime, ...]) -> tuple[RankMemory, ...]:
        """Bytes by rank, with `times` as the axis. Empty where this pass recorded none."""
        if self.watch is None:
            return ()
        static, receive = self.pipeline.static_bytes, self.pipeline.receive_bytes
        return self.watch.ranks(self._spans, {rank: (static(rank), receive(rank)) for rank in ranks}, times)


class MemoryWatch:
    """Records allocations, and gives each to the rank whose action had begun last."""

    def __init__(self, device: Device) -> None:
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

    def ranks(
        self, spans: Iterable[Span], fixed: Mapping[int, tuple[int, int]], times: tuple[ActionTime, ...]
    ) -> tuple[RankMemory, ...]:
        """A series per rank of `fixed`, by which each has bytes of parameters and of receive buffers.

        Samples move from their span to the action's place in `times`.
        """
        log = self._recorder.log
        time_ns = log.time_ns - clock_skew_ns(log, tuple(self._probes))
        in_order = sorted(spans, key=lambda span: span.start)
        starts = np.array([span.start for span in in_order], dtype=np.int64)
        last_begun = np.searchsorted(starts, time_ns, side="right") - 1
        acting = np.array([*(span.rank for span in in_order), -1])[last_begun]  # -1: before the first span
        places = {(action.rank, action.name): (action.start_ms * 1e6, action.end_ms * 1e6) for action in times}
        lived = lifetimes(log)

        def samples(rank: int) -> Iterator[tuple[int, int, str]]:
            born, died = (events[acting[lived.born] == rank] for events in (lived.born, lived.died))
            deltas = np.zeros(len(log.n_bytes) + 1, dtype=np.int64)
            np.add.at(deltas, born, log.n_bytes[born])
            np.subtract.at(deltas, died, log.n_bytes[born])
            (total, _), now = fixed[rank], 0
            yield now, total, ""
            for event in np.flatnonzero(deltas[:-1]):
                total += int(deltas[event])
                span = in_order[last_begun[event]]
                place = places.get((rank, span.name)) if span.rank == rank else None
                if place is not None:
                    share = (int(time_ns[event]) - span.start) / max(span.end - span.start, 1)
                    now = max(now, round(place[0] + min(max(share, 0.0), 1.0) * (place[1] - place[0])))
                yield now, total, span.name if place is not None else ""

        return tuple(
            RankMemory.of(rank, "measured", tuple(samples(rank)), parameter_bytes=parameters, receive_bytes=buffers)
            for rank, (parameters, buffers) in fixed.items()
        )
