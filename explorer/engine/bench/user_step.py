"""Real steps of a user's loop under a sequence of policies. All steps are counted and undone.

The steps follow each other as in training (an optimizer has state from the second step on) and draw the same random
numbers. All state is restored at the end and after a failed step, see state/snapshot.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

from torch import nn
from torch.utils.checkpoint import CheckpointError

from explorer.engine.bench.bench import Bench, Readings, Step, checkpoint_cost
from explorer.engine.bench.step import OnPhase, host_of
from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.device.device import device_of, device_of_model
from explorer.engine.device.memory_limit import machine_memory_limit
from explorer.engine.model.describe import describe_step
from explorer.engine.model.loaded import shapes
from explorer.engine.policy.apply import apply_policy, policy_of
from explorer.engine.policy.several_models import SeveralModels, called_models
from explorer.engine.state.rng import RngState
from explorer.engine.state.snapshot import StepSnapshot
from explorer.engine.watch.checkpoint_error import in_words
from explorer.engine.watch.modes import compiler_off
from explorer.engine.watch.scopes import around_backward
from explorer.errors import BadInput, ModelFailed, OutOfMemory
from explorer.record.allocations import Phase
from explorer.record.failure import is_out_of_memory
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement, Times
from explorer.record.policy import KEEP_ALL, Policy

N_TIMED = 3


class UserSteps:
    """Training steps of `model` by `step()`. The context manager restores all state on exit."""

    def __init__(self, model: nn.Module, step: Callable[[], object], where: str, *, notes_saved: bool = False) -> None:
        """`notes_saved`: a step that keeps everything notes what autograd saves, as plans with offload need it.

        Raises BadInput if the model already has a policy, or is neither on cpu nor on cuda."""
        if policy_of(model).units:
            raise BadInput(f"The model of {where} carries a policy already.", hint="Undo it first: handle.undo().")
        self._model, self._step, self._where = model, step, where
        self._device = device_of(device_of_model(model))
        self._bench = Bench(model, announced(model, self._take), self._device.clock())
        self._inputs, self._notes_saved = "", notes_saved
        self.n_steps = 0
        """Real steps so far. A step that ends after its forward counts too."""

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.enter_context(compiler_off())
            self._snapshot = StepSnapshot(self._model, self._step)
            opened.callback(self._snapshot.restore)
            self._generators = RngState.capture(self._model)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def graph(self) -> ModelGraph:
        """The block graph, from a step that ends at its first backward after a call of the model.

        Of several models, whose calls and backwards take turns, from a recorded step. Raises OutOfMemory if it is.
        """
        if isinstance(self._model, SeveralModels):
            run = self.recorded(KEEP_ALL)
            if run is None or run.graph is None:
                raise OutOfMemory("A step with everything kept does not fit.", hint="Take a smaller batch.")
            self._snapshot.restore()
            return run.graph
        graph = describe_step(self._model, self._take, self._where)
        self._snapshot.restore()
        return graph

    def recorded(self, policy: Policy) -> Measurement | None:
        """The second of two steps under `policy`. None if the steps do not fit; all state is then restored.

        Raises ModelFailed, with the block, if a recompute does other work than forward.
        """
        recordings: list[LoopRecording] = []

        def two_steps() -> None:
            self._take()
            self._device.release()
            notes_saved = self._notes_saved and not policy.units
            recordings.append(LoopRecording(self._model, None, self._where, notes_saved=notes_saved))
            with recordings[0]:
                self._take()

        with apply_policy(self._model, policy), host_of(policy):
            try:
                return recordings[0].measurement if self._fits(two_steps) else None
            except CheckpointError as error:
                hint = "Apply a policy of your own without that block. Under torch.func.jvp no block can be recomputed."
                raise ModelFailed(in_words(error, self._model), hint=hint) from error

    def timed(self, run: Measurement) -> Measurement:
        """`run`, which keeps everything, with times of its steps and blocks; unchanged if a step does not fit.

        A step near the limit fits at one time and fails at another.
        """
        bench, readings = self._bench, Readings()

        def steps() -> None:
            for _ in range(N_TIMED):
                readings.steps.append(bench.time())
                readings.blocks.append(bench.time_blocks(KEEP_ALL)[1])
            readings.operators = bench.time_operators()
            readings.checkpoint = checkpoint_cost(self._device.torch)

        return readings.added_to(run, bench.clock.name) if self._fits(steps) else run

    def in_turns(self, policies: Sequence[Policy]) -> list[Times]:
        """Times of whole steps under each policy, in turns: a slow minute affects all. Empty if one does not fit."""
        readings = [Readings() for _ in policies]

        def steps() -> None:
            for policy, of_policy in list(zip(policies, readings)) * N_TIMED:
                with apply_policy(self._model, policy), host_of(policy):
                    of_policy.steps.append(self._bench.time())

        times = [of_policy.times(self._bench.clock.name) for of_policy in readings] if self._fits(steps) else []
        return [of_policy for of_policy in times if of_policy is not None]

    def _fits(self, work: Callable[[], None]) -> bool:
        """Whether `work` got the memory that it requested. If not, all state is restored."""
        try:
            with machine_memory_limit():
                work()
        except Exception as error:
            if not is_out_of_memory(error):
                self._snapshot.restore()
                raise
        else:
            return True
        self._snapshot.restore()
        self._device.release()
        return False

    def _take(self) -> None:
        """Runs one step with the generators of the first step. Raises BadInput if the model's inputs differ."""
        self.n_steps += 1
        self._generators.restore()
        inputs: list[str] = []

        def note(_: object, args: object, kwargs: object) -> None:
            inputs.append(shapes((args, kwargs)))

        with ExitStack() as hooks:
            for model in called_models(self._model):
                hooks.enter_context(model.register_forward_pre_hook(note, with_kwargs=True))
            self._step()
        text = "; ".join(inputs)
        self._inputs = self._inputs or text
        if text != self._inputs:
            raise BadInput(
                f"The model was given {self._inputs} in the first step of {self._where} and {text} in a later one.",
                hint="Let the step take the same batch at each call.",
            )


def announced(model: nn.Module, step: Callable[[], object]) -> Step:
    """`step` as a step that announces its phases: calls of the model as forward, then backward, `between` elsewhere.

    A forward inside backward is a recompute of the user's own and belongs to backward.
    """

    def run(on_phase: OnPhase) -> None:
        phases: list[Phase] = ["between"]

        def begin(phase: Phase) -> None:
            phases.append("backward" if "backward" in phases else phase)
            on_phase(phases[-1])

        def end(*_: object) -> None:
            phases.pop()
            on_phase(phases[-1])

        with ExitStack() as hooks:
            for called in called_models(model):
                hooks.enter_context(called.register_forward_pre_hook(lambda *_: begin("forward")))
                hooks.enter_context(called.register_forward_hook(end, always_call=True))
            on_phase("between")
            with around_backward(lambda: begin("backward"), end, in_forward=lambda: "forward" in phases):
                step()

    return run
