"""`explorer.watch(model, optimizer, on_oom="heal")`: a refused batch runs again with more blocks recomputed.

    model(batch) ──── refused ──▶ put back, next plan, forward again ──────────────▶ the loop gets its output
    loss.backward() ─ refused ──▶ put back, next plan, forward again, backward again ▶ the loop goes on

1. A call of the model notes generators, buffers and plain numbers of modules; a second run starts from them.
2. Autograd saves every tensor of the call in a box (second_run.py). After a refusal the boxes are emptied.
3. Each output tensor notes the gradient that reaches it: the second backward starts there. The loss does not run again.
4. Gradients from before a backward are copied to the host, because a refused backward has added to some of them.

Recomputing changes no bit of a gradient, so the weights stay those of a training without the limit. Halving the batch,
the usual cure, changes the training. The optimizer's own step is never repeated.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from explorer.engine.device.device import current_rank, path_of_rank
from explorer.engine.device.memory_limit import clear_frames
from explorer.engine.model.loaded import REFUSES_HOOKS
from explorer.engine.policy.apply import PolicyHandle, apply_policy, policy_of
from explorer.engine.policy.several_models import SeveralModels
from explorer.engine.policy.units import is_recomputing
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.state.rng import RngState
from explorer.engine.watch.state_changes import tensors_in
from explorer.errors import BadInput, ExplorerError, message_of
from explorer.own_loop.record_step import RecordedRun
from explorer.own_loop.second_run import ForwardCall, NotHealed, StateBefore, autocast_contexts, computed_tensors, walk
from explorer.plan.names import listed
from explorer.record.failure import is_out_of_memory
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy
from explorer.view.drawing.units import count

Result = TypeVar("Result")
OUTSIDE = "memory was refused outside of the model's forward and backward, where nothing can be undone"
BY_FUNC = "the step calls torch.func, which refuses the hooks on saved tensors that a second run needs"
POINTS, SECONDS = 6, 1.0
"""Plans of the ladder, and the time to make them after the first step."""


@dataclass(frozen=True, kw_only=True)
class Healed:
    """A refusal after which the training went on."""

    step: int
    phase: str
    """`forward` or `backward`."""
    policy: Policy
    """The policy that is in force from this step on."""
    n_tries: int
    seconds: float
    """Time from the refusal to the end of the second run."""
    flop_ratio: float | None = None
    """FLOPs of each later step over those of a step without recompute, predicted."""

    @property
    def sentence(self) -> str:
        """What was done and what it costs."""
        times = count(self.n_tries, "further plan")
        cost = "" if self.flop_ratio is None else f" Each later step costs x{self.flop_ratio:.2f} FLOPs (predicted)."
        return (
            f"Healed: the {self.phase} of step {self.step} ran again with {listed(self.policy.blocks)} recomputed. "
            f"It took {times} and {self.seconds:.2f} s.{cost}"
        )


class Healer:
    """Wraps the calls of `model` from construction to `close`; `repair` is called when a backward has failed."""

    def __init__(self, model: nn.Module, record: Callable[[Exception], Measurement]) -> None:
        """`record` ends the record of the refused step, or makes one of the tensors in memory.

        Raises BadInput for a model whose step cannot run again: compiled, with a policy, or one of several ranks.
        """
        _refuse(model)
        self.reason = OUTSIDE
        """Why the last refusal was not undone."""
        self._plans: list[tuple[Policy, float | None]] = []
        """The ladder: policies with their predicted FLOP ratio, each with a lower peak than the one before."""
        self.step = 1
        self.healed: list[Healed] = []
        self.refusal: Measurement | None = None
        """The record of a refusal that was not undone."""
        self._model, self._record = model, record
        self._has_ladder = False
        self._moving: set[int] | None = None
        self._calls: list[ForwardCall] = []
        self._handle: PolicyHandle | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        self._is_inside = False
        self._calls_func = False
        """Whether the model's forward calls torch.func."""
        model.__dict__["_call_impl"] = _HealedCall(self, model._call_impl)

    def close(self) -> None:
        """Gives the model its own call back. The policy of the last plan stays in force until here."""
        call = self._model.__dict__.get("_call_impl")
        if isinstance(call, _HealedCall) and call.healer is self:
            del self._model.__dict__["_call_impl"]
        self.forget()
        self._undo()

    def forget(self) -> None:
        """Drops the calls and gradients of a step that has ended."""
        self._calls, self._gradients = [], []
        self.reason = OUTSIDE

    def call(self, inner: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A call of the model. A refusal inside is undone, and the call is made again under the next plan."""
        if self._is_inside or not torch.is_grad_enabled() or is_recomputing() or torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        if self._calls_func or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            self.reason = BY_FUNC
            return inner(*args, **kwargs)
        try:
            call = ForwardCall(args, kwargs, StateBefore(self._model, self._moving))
        except Exception as error:  # no room for the copies: the training goes on without them
            self.reason = f"the state before the forward could not be copied: {message_of(error)}"
            return inner(*args, **kwargs)
        self._is_inside = True
        try:
            output = self._first_run(call, inner)
        finally:
            self._is_inside = False
        try:
            if self._moving is None:
                self._moving = {id(buffer.tensor) for buffer in call.before.buffers if buffer.moved}
            call.listen(output)
            call.autocast = autocast_contexts()
            self._calls = [*self._calls[-1:], call]
        except Exception as error:  # a backward without this call is not healed, and the training goes on
            self._calls, self.reason = [], f"the forward could not be noted: {message_of(error)}"
        return output

    def _first_run(self, call: ForwardCall, inner: Callable[..., object]) -> object:
        try:
            return call.run(inner)
        except Exception as error:
            refusal = error
        if REFUSES_HOOKS in message_of(refusal):
            self._calls_func, self.reason = True, BY_FUNC
            self._put_back(call)
            return inner(*call.args, **call.kwargs)
        if not is_out_of_memory(refusal):
            raise refusal
        try:
            return self._again(refusal, call, "forward", lambda: call.run(inner))
        except NotHealed as trouble:
            self.reason = message_of(trouble)
        raise refusal

    @property
    def backward_listeners(self) -> dict[str, Callable[..., Any]]:
        """Arguments of `around_backward`."""
        return {"begins": self.backward_begins, "ended": self.forget, "repaired": self.repair}

    def backward_begins(self) -> None:
        """Copies the gradients that stand before a backward."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        try:
            self._gradients = [
                (p, None if p.grad is None else p.grad.detach().to("cpu", copy=True)) for p in parameters
            ]
        except Exception:  # no room for the copies: the training goes on without them
            self._calls = []

    def repair(self, error: Exception, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """After a failed `torch.autograd.backward(*args, **kwargs)`: whether the step ran again up to here."""
        if self._is_inside or not is_out_of_memory(error):
            return False
        self._is_inside = True
        try:
            call, numbers = self._interrupted(args, kwargs)
            rng = RngState.capture(self._model)
            gradients = [call.gradients[i] for i in numbers]
            inner = self._model.__dict__["_call_impl"].inner

            def again() -> None:
                outputs = computed_tensors(call.run(inner))
                rng.restore()
                torch.autograd.backward([outputs[i] for i in numbers], gradients)

            self._again(error, call, "backward", again)
        except NotHealed as trouble:
            self.reason = message_of(trouble)
            return False
        finally:
            self._is_inside = False
        self.forget()
        return True

    def _again(self, error: Exception, call: ForwardCall, phase: str, run: Callable[[], Result]) -> Result:
        """What `run` returns under the first plan that is not refused. Raises NotHealed after the last plan."""
        start, n_tries = time.monotonic(), 0
        self._note(error)
        while True:
            clear_frames(error)
            call.free()
            self._put_back(call)
            if not self._plans:
                raise NotHealed("no plan with a lower peak is left")
            policy, flop_ratio = self._plans.pop(0)
            try:
                self._undo()
                self._handle = apply_policy(self._model, policy)
                n_tries += 1
                result = run()
                break
            except ExplorerError:  # the model refuses the policy
                continue
            except Exception as again:
                if not is_out_of_memory(again):
                    raise
                clear_frames(again)
        error.__traceback__ = None  # it holds the frames that hold the error
        seconds = time.monotonic() - start
        healed = Healed(
            step=self.step, phase=phase, policy=policy, n_tries=n_tries, seconds=seconds, flop_ratio=flop_ratio
        )
        self.healed.append(healed)
        self._write(healed)
        return result

    def step_ended(self, n_steps: int, run: Measurement | None) -> None:
        """After a step of the optimizer; `run` is its record. The first complete record makes the ladder."""
        self.forget()
        self.step = n_steps + 1
        if run is not None and run.complete and not self._has_ladder:
            self._has_ladder = True
            self._plans = ladder(run)

    def _note(self, error: Exception) -> None:
        """Records the refusal while its tensors are held. Before any complete step, the ladder is the preset `all`."""
        with suppress(Exception):  # memory is short: the file of the step is worth less than the step
            self.refusal = self._record(error)
        if not self._has_ladder and self.refusal is not None and self.refusal.graph is not None:
            self._has_ladder = True
            from explorer.plan.policy.presets import preset

            with suppress(ExplorerError):
                self._plans = [(preset("all", self.refusal.graph), None)]

    def _write(self, healed: Healed) -> None:
        """Writes the file of a healed step, with what it cost."""
        run, self.refusal = self.refusal, None
        try:
            if run is not None and run.failure is not None:
                run = replace(run, failure=replace(run.failure, hint=healed.sentence))
                RecordedRun(run).save(path_of_rank(Path(f"healed.step{healed.step}.explorer")))
        except Exception as trouble:
            warnings.warn(f"Step {healed.step} ran again and has no file. {message_of(trouble)}.", stacklevel=2)

    def _put_back(self, call: ForwardCall) -> None:
        call.before.restore()
        torch.clear_autocast_cache()
        for parameter, content in self._gradients:
            if content is None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.copy_(content)

    def _undo(self) -> None:
        if self._handle is not None:
            self._handle.undo()
            self._handle = None

    def _interrupted(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[ForwardCall, list[int]]:
        """The call under a failed backward, and the outputs whose gradients came from outside of the call.

        Raises NotHealed for a backward that cannot be repeated.
        """
        if any(kwargs.get(name) for name in ("retain_graph", "create_graph", "inputs")) or any(args[2:]):
            raise NotHealed("a backward that keeps its graph, or is limited to some inputs, is not repeated")
        roots = tensor_leaves(args[:1] or kwargs.get("tensors"))
        by_node = {reached: (call, i) for call in self._calls for i, reached in enumerate(call.outputs)}
        parameters = {id(parameter) for parameter in self._model.parameters()}
        outputs: list[tuple[ForwardCall, int]] = []
        for reached in walk(((root.grad_fn, root.output_nr) for root in roots), set(by_node)):
            if reached in by_node:
                outputs.append(by_node[reached])
            elif id(getattr(reached[0], "variable", None)) in parameters:
                raise NotHealed("the loss uses a parameter outside of the model's forward")
        calls = {id(call): call for call, _ in outputs}
        if len(calls) != 1:
            raise NotHealed(f"the backward reaches {len(calls)} calls of the model, and one can be repeated")
        call, numbers = next(iter(calls.values())), [i for _, i in outputs]
        if any(tensor.requires_grad for tensor in tensors_in((call.args, call.kwargs))):
            raise NotHealed("the model's input needs a gradient, and its part of the graph is partly used")
        used = {call.outputs[i] for i in numbers}
        if any(used.intersection(walk(node.next_functions, set())) for node, _ in used if node is not None):
            raise NotHealed("the loss uses two outputs of the model, of which one is computed from the other")
        if not all(i in call.gradients for i in numbers):
            raise NotHealed("memory was refused in the backward of the loss, before the model's own")
        return call, numbers


@dataclass(frozen=True)
class _HealedCall:
    """The call of a watched model. A copy of the model calls itself without the healer."""

    healer: Healer
    inner: Callable[..., object]

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.healer.call(self.inner, args, kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial, (self.inner,)


def ladder(run: Measurement) -> list[tuple[Policy, float | None]]:
    """Policies for a recorded step with their FLOP ratio: each saves fewer bytes in forward than the one before.

    Plans alone would not do: no plan lowers a peak that lies in the optimizer's step, and forward may still be refused.
    """
    from explorer.plan.planners.planner import Planner
    from explorer.plan.policy import presets
    from explorer.plan.predict.forecaster import Forecaster

    if run.graph is None or not run.complete:
        return []
    policies = [plan.policy for plan in Planner(run, run.graph).front(POINTS, seconds=SECONDS)]
    for name in ("every-8", "every-4", "every-2", "sqrt"):
        with suppress(ExplorerError):  # no block is one to recompute by itself
            policies.append(presets.preset(name, run.graph))
    policies.extend(policy for _, policy in presets.ladder(run.graph))
    forecaster = Forecaster(run, run.graph)
    forecasts = [(policy, forecaster.forecast(policy)) for policy in policies if "" not in policy.blocks]
    saved = [(found.saved_after_forward_bytes, found.flop_ratio, policy) for policy, found in forecasts]
    rungs: list[tuple[Policy, float | None]] = []
    last = run.saved_after_forward_bytes
    for saved_bytes, flop_ratio, policy in sorted(saved, key=lambda rung: (-(rung[0] or 0), rung[1] or 0)):
        if saved_bytes is not None and last is not None and saved_bytes < last:
            rungs.append((policy, flop_ratio))
            last = saved_bytes
    return rungs


def _refuse(model: nn.Module) -> None:
    reasons = []
    if isinstance(model, SeveralModels):
        reasons.append("it is several models")
    if model._compiled_call_impl is not None or any("OptimizedModule" in type(m).__name__ for m in model.modules()):
        reasons.append("it is compiled")
    if policy_of(model).units:
        reasons.append("it carries a policy already")
    if (current_rank() or (0, 1))[1] > 1:
        reasons.append("other ranks would not run their batch again")
    if reasons:
        raise BadInput(
            f"A refused step of this model cannot run again: {' and '.join(reasons)}.",
            hint="Give on_oom a file instead: the file says which policy would have fitted.",
        )
