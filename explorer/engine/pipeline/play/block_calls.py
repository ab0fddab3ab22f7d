"""Real runs of each block: forward calls, runs for backward, and the time of the runs for backward."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from explorer.engine.device.device import Ticks, device_of
from explorer.engine.policy.units import is_recomputing, observe_recompute
from explorer.record.pipeline_run import BlockCalls

if TYPE_CHECKING:
    from explorer.engine.pipeline.cut.build import Pipeline


@dataclass
class CallCount:
    """Calls by fqn, and when each run for backward began and ended, on the clock of the actions."""

    forward: Counter[str] = field(default_factory=Counter)
    recompute: Counter[str] = field(default_factory=Counter)
    reruns: list[tuple[Any, Any]] = field(default_factory=list)

    def recompute_ms(self, clock: Ticks, first: int, end: int) -> float:
        """Milliseconds of the runs number `first` to `end`, once the device has settled."""
        return sum(clock.between_ms(begun, over) for begun, over in self.reruns[first:end])

    def blocks(self, pipeline: Pipeline) -> tuple[BlockCalls, ...]:
        """Calls of each block of the stages, in order. A rerun of a unit inside a block counts for the block."""
        by_block = []
        for part in pipeline.parts:
            for fqn in part.blocks:
                mine = {fqn, *(unit.blocks[0] for unit in pipeline.spec.policy.units if fqn in unit.blocks)}
                inner = [n for unit, n in self.recompute.items() if unit in mine or unit.startswith(f"{fqn}.")]
                by_block.append(
                    BlockCalls(
                        fqn=fqn,
                        stage=part.stage,
                        n_forward=self.forward[fqn],
                        n_recompute=max(inner, default=0),
                        n_microbatches=pipeline.n_microbatches,
                    )
                )
        return tuple(by_block)


def _called(count: CallCount, fqn: str, *_: Any) -> None:
    if not is_recomputing():
        count.forward[fqn] += 1


@contextmanager
def counting_calls(pipeline: Pipeline, count: CallCount, clock: Ticks | None = None) -> Iterator[None]:
    """Counts calls by hooks on the stages' blocks and on the policy's recompute scopes, without waiting for a GPU.

    `clock` is the clock of the actions (default: the device's).
    """
    opened: dict[int, list[Any]] = {}
    clock = clock or device_of(pipeline.trainee.device).clock()

    def scope(fqn: str, entering: bool) -> None:
        stack = opened.setdefault(threading.get_ident(), [])
        if entering:
            count.recompute[fqn] += 1
            stack.append(clock.mark())
        elif stack:
            begun = stack.pop()
            if not stack:
                count.reruns.append((begun, clock.mark()))

    with ExitStack() as hooks:
        for part in pipeline.parts:
            for fqn in part.blocks:
                module = pipeline.trainee.model.get_submodule(fqn)
                hook = module.register_forward_pre_hook(partial(_called, count, fqn))
                hooks.callback(hook.remove)
        hooks.enter_context(observe_recompute(scope))
        yield
