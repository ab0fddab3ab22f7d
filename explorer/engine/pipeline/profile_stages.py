"""Measurement of single stages of a pipeline: times and bytes of every action, with backward whole and in two parts.

The pipeline has two microbatches. The first backward makes the parameters' gradients, the second adds to the gradients.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from torch import Tensor

from explorer.engine.pipeline.cut.build import Pipeline
from explorer.engine.pipeline.cut.split import Contiguous, StageModule
from explorer.engine.pipeline.first_look import FirstLook, Levels, in_turn, levels_of, listening, place
from explorer.engine.pipeline.play.inproc import run_pass
from explorer.errors import NotOnThisDevice
from explorer.record.pipeline_cost import ActionCost, LastBlock, SplitCost
from explorer.record.pipeline_run import ActionTime


class StageBench:
    """Warm stages of a pipeline, with backward whole and split, one rank a stage, and the readings of all passes."""

    def __init__(self, pipeline: Pipeline, look: FirstLook, stages: Collection[int], tick: Callable[[], None]) -> None:
        """Readings of `stages` of one kind are pooled. `tick` is called before every pass."""
        self._tick, self._look = tick, look
        self._alone = stages, look.mail
        self.pipeline = dataclasses.replace(pipeline, rows=in_turn("FB", len(pipeline.parts)))
        self.split: Pipeline | None = None
        self._times: defaultdict[tuple[int, str], list[ActionTime]] = defaultdict(list)
        tick()
        run_pass(self.pipeline, alone=self._alone)
        split = dataclasses.replace(pipeline, rows=in_turn("FIW", len(pipeline.parts)))
        tick()
        try:
            run_pass(split, alone=self._alone)
        except (NotOnThisDevice, RuntimeError):  # torch wraps errors of a split backward
            return  # costs of other schedules stay valid, and a run with a split backward reports the error
        self.split = split

    def time(self) -> None:
        """Times one pass of each pipeline by the device's clock, and adds the readings to earlier readings."""
        for pipeline in (self.pipeline, self.split):
            self._tick()
            for time in run_pass(pipeline, alone=self._alone).actions if pipeline is not None else ():
                if time.kind == "F" or time.microbatch:  # the first backward adds to nothing, all others do
                    self._times[self._look.kinds[time.stage], time.kind].append(time)

    def ms(self, stage: int, kind: str, what: str = "duration_ms") -> float:
        """Median over all readings of the stage's kind, in milliseconds; `what` is a field of ActionTime."""
        return statistics.median(getattr(time, what) for time in self._times[self._look.kinds[stage], kind])

    def least_ms(self, stage: int, kind: str) -> float:
        """The quickest reading in milliseconds, where a busy machine shows least."""
        return min(time.duration_ms for time in self._times[self._look.kinds[stage], kind])

    def costs(self, weight_ms_per_block: float) -> dict[int, ActionCost]:
        """Costs by kind, for the kinds of the bench's stages."""
        firsts = sorted({self._look.kinds[stage] for stage in self._alone[0]})
        self._tick()
        whole = self._watched(self.pipeline, firsts)
        costs = {stage: self._cost(stage, whole[stage]) for stage in firsts}
        if self.split is None:
            return costs
        ways = []
        for watch in (self._watched_inside, self._watched_held, self._watched):
            self._tick()
            ways.append(watch(self.split, firsts))
        return {
            stage: msgspec.structs.replace(
                cost, split=self._split_cost(stage, [way[stage] for way in ways], cost, weight_ms_per_block)
            )
            if stage
            else cost
            for stage, cost in costs.items()
        }

    def _cost(self, stage: int, levels: Levels) -> ActionCost:
        forward, first_back, back = (levels[f"{stage}{name}"] for name in ("F0", "B0", "B1"))
        last = len(self.pipeline.parts) - 1
        made = self._look.loss_bytes
        if stage < last:
            made = sum(m.n_bytes for m in self.pipeline.parts[stage].metas_out) - self._look.passed[stage]
        return ActionCost(
            forward_ms=self.ms(stage, "F"),
            backward_ms=self.ms(stage, "B"),
            recompute_ms=self.ms(stage, "B", "recompute_ms"),
            saved_bytes=forward.left,
            forward_extra_bytes=forward.high,
            first_backward_extra_bytes=first_back.high,
            backward_extra_bytes=back.high,
            # Saved tensors are freed; tensors sent either way, or the loss, are still held here.
            sent_gradient_bytes=max(back.left + forward.left - made, 0) if stage else 0,
        )

    def _split_cost(self, stage: int, ways: list[Levels], cost: ActionCost, weight_ms_per_block: float) -> SplitCost:
        """`ways`: levels inside a longer stage, inside with the graph held, and at the end of a stage."""
        inside, held, end = ({name: way[f"{stage}{name}"] for name in ("I1", "W0", "W1")} for way in ways)
        sent = (cost.sent_gradient_bytes or 0) - self._look.passed[stage]
        return SplitCost(
            input_ms=self.ms(stage, "I"),
            weight_ms=self.ms(stage, "W"),
            input_recompute_ms=self.ms(stage, "I", "recompute_ms"),
            weight_recompute_ms=self.ms(stage, "W", "recompute_ms"),
            weight_ms_per_block=weight_ms_per_block,
            input_extra_bytes=inside["I1"].high,
            owed_bytes=inside["I1"].left - sent,
            weight_extra_bytes=inside["W1"].high,
            first_weight_extra_bytes=inside["W0"].high,
            weight_end_bytes=inside["W1"].left,
            last=LastBlock(
                input_extra_bytes=end["I1"].high,
                held_bytes=held["I1"].left - sent,
                owed_bytes=end["I1"].left - sent,
                weight_extra_bytes=end["W1"].high,
                first_weight_extra_bytes=end["W0"].high,
            ),
        )

    def _watched(self, pipeline: Pipeline, stages: Collection[int]) -> dict[int, Levels]:
        trace = run_pass(pipeline, alone=(stages, self._look.mail), memory=True)
        return {one.rank: levels_of(one) for one in trace.memory(pipeline, tuple(trace.actions), stages)}

    def _watched_held(self, pipeline: Pipeline, stages: Collection[int]) -> dict[int, Levels]:
        """Levels with every stretch's output and graph held from outside, as while I goes on in the same stage."""
        graphs: list[Any] = []
        with listening(pipeline, lambda module, received, sent: graphs.extend((one, one.grad_fn) for one in sent)):
            return self._watched(pipeline, stages)

    def _watched_inside(self, pipeline: Pipeline, stages: Collection[int]) -> dict[int, Levels]:
        """Levels with every graph held, and output gradients held only by the backward that reads them."""
        graphs: list[Any] = []

        def let_go(module: StageModule, received: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            came = {place(tensor) for tensor in received}
            made = tuple(OwnGradient.apply(t) if t.requires_grad and place(t) not in came else t for t in sent)
            graphs.extend(tensor.grad_fn for tensor in made)
            return made

        with listening(pipeline, let_go):
            return self._watched(pipeline, stages)


class OwnGradient(Contiguous):
    """Passes its input on. The gradient that goes back is a copy."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()
