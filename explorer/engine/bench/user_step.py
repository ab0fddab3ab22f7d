"""Real steps of a user's loop under a sequence of policies. All steps are counted and undone.

The steps follow each other as in training (an optimizer has state from the second step on) and draw the same random
numbers. All state is restored at the end and after a failed step, see state/snapshot.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

import msgspec
from torch import nn

from explorer.engine.bench.block_costs import with_times
from explorer.engine.bench.checkpoint_cost import checkpoint_cost
from explorer.engine.bench.timing import BlockSamples, Timed, live_block_ms, live_operator_times, live_step_ms
from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.device.device import device_of, device_of_model
from explorer.engine.device.memory_limit import machine_memory_limit
from explorer.engine.model.describe import describe_step
from explorer.engine.model.loaded import shapes
from explorer.engine.policy.apply import apply_policy, policy_of
from explorer.engine.state.rng import RngState
from explorer.engine.state.snapshot import StepSnapshot, optimizers_of
from explorer.engine.watch.uncompiled import compiler_off
from explorer.errors import BadInput
from explorer.record.failure import is_out_of_memory
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement, Times
from explorer.record.policy import Policy

N_TIMED = 3


class UserSteps:
    """Training steps of `model` by `step()`. The context manager restores all state on exit."""

    def __init__(self, model: nn.Module, step: Callable[[], object], where: str) -> None:
        """Raises BadInput if the model already has a policy, or is neither on cpu nor on cuda."""
        if policy_of(model).units:
            raise BadInput(f"The model of {where} carries a policy already.", hint="Undo it first: handle.undo().")
        self._model, self._step, self._where = model, step, where
        self._device = device_of(device_of_model(model))
        self._given = ""
        self.n_steps = 0
        """Real steps so far. A step that ends after its forward counts too."""

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.enter_context(compiler_off())
            self._found = StepSnapshot(self._model, self._step)
            opened.callback(self._found.restore)
            self._drawn = RngState.capture(self._model)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def graph(self) -> ModelGraph:
        """The block graph, from a step that ends at the begin of its backward."""
        graph = describe_step(self._model, self._take, self._where)
        self._found.restore()
        return graph

    def recorded(self, policy: Policy) -> Measurement | None:
        """The second of two steps under `policy`. None if the steps do not fit; all state is then restored."""
        live: list[LoopRecording] = []

        def two_steps() -> None:
            self._take()
            self._device.release()
            live.append(LoopRecording(self._model, next(iter(optimizers_of(self._model)), None), self._where))
            with live[0]:
                self._take()

        with apply_policy(self._model, policy):
            fits = self._fits(two_steps)
        return live[0].measurement if fits else None

    def timed(self, run: Measurement) -> Measurement:
        """`run`, which keeps everything, with times of its steps and blocks; unchanged if a step does not fit.

        A step near the limit fits at one time and fails at another.
        """
        clock, timed = self._device.clock(), Timed()

        def steps() -> None:
            for _ in range(N_TIMED):
                timed.steps.append(live_step_ms(self._model, self._take, clock))
                timed.blocks.append(live_block_ms(self._model, self._take, clock))
            timed.operators = live_operator_times(self._model, self._take, clock)
            timed.checkpoint = checkpoint_cost(self._device.torch)

        if not self._fits(steps):
            return run
        samples, nothing = timed.block_samples(), BlockSamples()
        blocks = tuple(with_times(cost, samples.get(cost.fqn, nothing)) for cost in run.blocks)
        return msgspec.structs.replace(run, times=timed.times(clock.name), blocks=blocks)

    def in_turns(self, policies: Sequence[Policy]) -> list[Times]:
        """Times of whole steps under each policy, in turns: a slow minute affects all. Empty if one does not fit."""
        clock, timed = self._device.clock(), [Timed() for _ in policies]

        def steps() -> None:
            for policy, one in list(zip(policies, timed)) * N_TIMED:
                with apply_policy(self._model, policy):
                    one.steps.append(live_step_ms(self._model, self._take, clock))

        fits = self._fits(steps)
        times_of_each = [one.times(clock.name) for one in timed] if fits else []
        return [times for times in times_of_each if times is not None]

    def _fits(self, work: Callable[[], None]) -> bool:
        """Whether `work` got the memory that it requested. If not, all state is restored."""
        try:
            with machine_memory_limit():
                work()
        except Exception as error:
            if not is_out_of_memory(error):
                self._found.restore()
                raise
        else:
            return True
        self._found.restore()
        self._device.release()
        return False

    def _take(self) -> None:
        """Runs one step with the generators of the first step. Raises BadInput if the model's inputs differ."""
        self.n_steps += 1
        self._drawn.restore()
        given: list[str] = []
        noted = self._model.register_forward_pre_hook(
            lambda _, args, kwargs: given.append(shapes((args, kwargs))), with_kwargs=True
        )
        try:
            self._step()
        finally:
            noted.remove()
        in_words = "; ".join(given)
        self._given = self._given or in_words
        if in_words != self._given:
            raise BadInput(
                f"The model was given {self._given} in the first step of {self._where} and {in_words} in a later one.",
                hint="Let the step take the same batch at each call.",
            )
