"""A model and its training step, run from one state as often as a comparison needs.

A `SpecProgram` trains a new copy of a loaded model in each run. A `StepProgram` trains the user's own model, because a
copy of a compiled or sharded model differs; the user's step runs its optimizer itself.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from explorer.engine.bench.bench import Bench, bench_of
from explorer.engine.bench.memory import FirstPeak
from explorer.engine.bench.step import OnPhase, Trainee, autocast, forward_backward, ignore, optimizer_step, prepare
from explorer.engine.compare.diffs import Tensors, is_floating
from explorer.engine.compare.watched import StateAudit
from explorer.engine.device.device import device_of
from explorer.engine.model.conditions import AUTOCAST
from explorer.engine.model.equal_models import copy_batch, plain_buffers, plain_modules, plain_parameters
from explorer.engine.model.loaded import Loaded, call
from explorer.engine.state.bits import is_sparse_equal, laid_out_as, whole
from explorer.engine.state.rng import seed_everything
from explorer.engine.state.snapshot import ModelSnapshot, OptimizerSnapshot, SharedSnapshot
from explorer.engine.state.state_diff import State, StateKey, plain_copy, read_state
from explorer.engine.watch.modes import compiler_off
from explorer.engine.watch.scopes import after_closure
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec

Step = Callable[[nn.Module, object], object]
"""One training step: runs forward and backward of a model on a batch, both arguments."""


def formats_of(spec: RunSpec) -> set[torch.dtype]:
    """Floating types of a run beside those of its gradients."""
    return {AUTOCAST[spec.autocast]} if spec.autocast != "none" else set()


class SpecProgram:
    """The step of a RunSpec. `start` makes a new copy of `loaded`, which never runs itself; `end` frees the copy."""

    stepped: bool | None = None
    no_float64_because = ""
    initial_state: State = {}

    def __init__(self, spec: RunSpec, loaded: Loaded, shared: SharedSnapshot | None = None) -> None:
        self.spec, self._loaded = spec, loaded
        self.readings: list[dict[str, float]] = []
        """Milliseconds of the last step of each run of several steps, by phase and as `step`."""
        self.peak = FirstPeak()
        self.observed_trainee: Trainee | None = None
        """The trainee of the observed run after its end, without its policy."""
        self._shared = shared or SharedSnapshot(loaded.model)
        self._trainee: Trainee | None = None
        self._on_phase: OnPhase = ignore
        self.moved_by_backward: frozenset[StateKey] = frozenset()
        """State that the backward of the observed run changed."""
        self.formats = formats_of(spec)

    def under(self, spec: RunSpec) -> SpecProgram:
        """The program of another spec of the same model."""
        return SpecProgram(spec, self._loaded, self._shared)

    def in_float64(self) -> SpecProgram:
        """The same steps without a policy, in float64."""
        return self.under(replace(self.spec, dtype="float64", autocast="none", policy=KEEP_ALL, plan=None))

    def start(self) -> Self:
        self._shared.restore()
        self._trainee = prepare(self.spec, self._loaded)
        self._steps: list[dict[str, float]] = []
        return self

    def end(self) -> None:
        self.readings += self._steps[1:][-1:]  # the first step makes the optimizer's state
        self.peak.is_read = True
        self.trainee.handle.undo()  # a wrapped model is a cycle: its GPU memory would stay during the next run
        self._trainee = None

    @property
    def trainee(self) -> Trainee:
        assert self._trainee is not None, "no run has started"
        return self._trainee

    @property
    def model(self) -> nn.Module:
        return self._loaded.model if self._trainee is None else self._trainee.model

    @property
    def batches(self) -> dict[str, object]:
        return {"inputs": self.trainee.inputs, "targets": self.trainee.targets}

    def take_step(self, lead: Tensors) -> float:
        """Runs forward and backward and returns the loss."""
        on_phase, self._on_phase = self._on_phase, ignore
        losses: list[float] = []
        self.peak.is_read = self.peak.is_read or bool(self._steps)
        with self.peak.reading(self.trainee):
            times = self._bench.time(on_phase, lambda mark: losses.append(forward_backward(self.trainee, mark)))
        self._steps.append(times)
        on_phase("optimizer")
        return losses[0]

    def optimize(self) -> None:
        if self.trainee.optimizer is not None:
            with self.peak.reading(self.trainee):
                times, step = self._bench.time(step=partial(optimizer_step, self.trainee)), self._steps[-1]
            step |= {"optimizer": times["optimizer"], "step": step["step"] + times["optimizer"]}

    @property
    def _bench(self) -> Bench:
        return bench_of(self.trainee, device_of(self.trainee.device))

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.named().items() if parameter.requires_grad}

    def state(self) -> State:
        return read_state(self.model, whole=True)

    def eval_output(self) -> Tensor | None:
        """Floating tensors of the model's output in eval mode, as one flat tensor. None if the output has no such
        tensor or the model fails (some models take other inputs in eval mode)."""
        seed_everything(self.spec.seed)
        modes = {module: module.training for module in self.model.modules()}
        try:
            self.model.eval()
            with (
                warnings.catch_warnings(action="ignore"),  # reentrant: "none of the inputs requires grad", as meant
                torch.no_grad(),
                autocast(self.trainee),
            ):
                output = call(self.model, self.trainee.inputs)
        except Exception:  # detection models and the like: nothing to compare, and not the policy's fault
            return None
        finally:
            for module, trains in modes.items():
                module.training = trains
        leaves = tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output)  # transformers' ModelOutput
        tensors = [leaf.detach().flatten().cpu() for leaf in leaves if isinstance(leaf, Tensor) and is_floating(leaf)]
        return torch.cat(tensors) if tensors else None

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Reads `moved_by_backward` in the run inside, which has started."""
        audit = StateAudit(self.model)
        self._on_phase, self.observed_trainee = audit.on_phase, self.trainee
        yield
        self.moved_by_backward = frozenset(audit.changes)


@dataclass
class StepProgram:
    """A user's step and the model that the step trains, restored in place; see `step_programs`."""

    step: Step
    model: nn.Module
    batch: object
    parameters: tuple[str, ...] = ()
    """Plain names of the parameters that are compared."""
    before_run: Callable[[], None] = lambda: None
    """Restores what each run changes outside of models and optimizers."""
    dtype: torch.dtype | None = None
    """The type to which floating tensors are cast before the step; None casts nothing."""
    models: list[ModelSnapshot] = field(default_factory=list)
    """Every model to restore before a run: both programs may train the same parameters."""
    optimizers: dict[int, OptimizerSnapshot] = field(default_factory=dict)
    """Every optimizer of both programs that has stepped so far, by identity."""
    initial_state: State = field(default_factory=dict)
    formats: set[torch.dtype] = field(default_factory=set)
    """Floating types of the outputs of all modules in the observed run."""
    stepped: bool = False
    """Whether an optimizer of torch stepped in the last step, on gradients that stood when it began."""
    settings: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Settings of the optimizers by parameter and name of the setting: one text for each optimizer step of a run."""

    @property
    def no_float64_because(self) -> str:
        if any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters()):
            return "The model is sharded: FSDP gathers parameters in the type in which it sharded them, not in float64."
        if any(model.is_replicated for model in self._models_of_parameters()):
            return "DDP sums gradients by hooks, which torch drops when a parameter changes its type."
        return ""

    def _models_of_parameters(self) -> list[ModelSnapshot]:
        """The models, of both programs, that hold parameters of this program's model."""
        return [model for model in self.models if model.shares(self.model)]

    def in_float64(self) -> StepProgram:
        """The same step over tensors of float64, without a compiler."""
        return dataclasses.replace(self, dtype=torch.float64)

    def start(self) -> Self:
        self.before_run()
        self.settings, cast = {}, self._models_of_parameters()
        for model in self.models:
            model.restore(self.dtype if model in cast else None)
        for optimizer in self.optimizers.values():
            optimizer.restore()
        self.batches = {"batch": tree_map(self._cast, copy_batch(self.batch))}
        return self

    def end(self) -> None:
        """Frees nothing: the model is the user's own."""

    def _cast(self, leaf: object) -> object:
        if self.dtype is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().to(self.dtype).requires_grad_(leaf.requires_grad)

    def take_step(self, lead: Tensors) -> float | None:
        """Runs the step and returns its loss; None if the step returns none.

        Gradients are read when the first optimizer starts, or at the end. The optimizer then gets the gradients of
        `lead`, if any: with equal gradients, differences of the parameters come from the optimizers alone. An optimizer
        with a closure (LBFGS) makes its gradients itself: those of the closure's first call are read.
        """
        self.stepped, self._lead = False, lead
        self._gradients: dict[str, Tensor | None] = {}
        self._lent: list[tuple[Tensor, Tensor]] = []
        before = register_optimizer_step_pre_hook(self._before_optimizer)
        after = register_optimizer_step_post_hook(self._after_optimizer)
        with before, after, compiler_off() if self.dtype else nullcontext():
            loss = self.step(self.model, self.batches["batch"])
        self._read_gradients(self.named())
        value = loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else math.nan
        return None if math.isnan(value) else value

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = OptimizerSnapshot(optimizer)
        groups = [(dict(_settings(optimizer, group)), group["params"]) for group in optimizer.param_groups]
        settings_of = {id(parameter): settings for settings, parameters in groups for parameter in parameters}
        parameters = {name: parameter for name, parameter in self.named().items() if id(parameter) in settings_of}
        for name, parameter in parameters.items():
            for setting, text in settings_of[id(parameter)].items():
                self.settings.setdefault((name, setting), []).append(text)
        with_closure = after_closure(args, kwargs, partial(self._read_gradients, parameters))
        if with_closure is None:
            self.stepped = True
            self._read_gradients(parameters)
            for name, parameter in parameters.items():
                own, lead = parameter.grad, self._lead.get(name)
                if lead is not None and own is not None and not is_sparse_equal(own, lead):
                    self._lent.append((own, own.clone()))
                    own.copy_(laid_out_as(own, lead))
        return with_closure

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Restores the program's gradients: a step that does not zero its gradients adds to them."""
        for lent, gradient in self._lent:
            lent.copy_(gradient)
        self._lent.clear()

    def _read_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in self._gradients:
                gradient = parameter.grad
                self._gradients[name] = None if gradient is None else whole(gradient).detach().clone()

    def optimize(self) -> None:
        """Does nothing: the step has run its optimizer."""

    def named(self) -> dict[str, nn.Parameter]:
        parameters = plain_parameters(self.model)
        return {name: parameters[name] for name in self.parameters}

    def buffers(self) -> dict[str, Tensor]:
        return plain_buffers(self.model)

    def gradients(self) -> dict[str, Tensor | None]:
        return self._gradients

    def state(self) -> State:
        plain = {id(module): fqn for fqn, module in reversed(list(plain_modules(self.model)))}
        names = {fqn: plain[id(module)] for fqn, module in self.model.named_modules() if id(module) in plain}
        return {(names[key[0]], *key[1:]): value for key, value in read_state(self.model).items() if key[0] in names}

    def eval_output(self) -> None:
        """None: how the user evaluates the model is not known."""

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Reads `formats` in the run inside: outputs show autocast, gradients do not."""

        def look(module: nn.Module, inputs: object, output: object) -> None:
            leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and is_floating(leaf))
            self.formats.update(leaf.dtype for leaf in leaves)

        with register_module_forward_hook(look):
            yield


_NO_SETTING = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Entries of an optimizer's group that choose no other step: the way to compute it, or a schedule's memory."""


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and short texts of the settings with which an optimizer steps the parameters of a group."""
    yield "the class", type(optimizer).__name__
    for name in (name for name in group if name not in _NO_SETTING):
        leaves = tree_leaves(group[name])
        parts = [leaf.item() if isinstance(leaf, Tensor) and leaf.numel() == 1 else leaf for leaf in leaves]
        if all(isinstance(part, (bool, int, float, str, NoneType)) for part in parts):
            texts = [f"{part:.6g}" if isinstance(part, float) else str(part) for part in parts]
            yield name, texts[0] if len(parts) == 1 else f"({', '.join(texts)})"


Program = SpecProgram | StepProgram


@contextmanager
def step_programs(
    sides: Sequence[tuple[Step, nn.Module]],
    batch: object,
    parameters: tuple[str, ...],
    before_run: Callable[[], None] = lambda: None,
) -> Iterator[list[StepProgram]]:
    """Programs over the same parameters. All models, and all optimizers that stepped, are restored at the end."""
    programs = [StepProgram(step, model, batch, parameters, before_run) for step, model in sides]
    models, optimizers = programs[0].models, programs[0].optimizers
    with ExitStack() as at_end:
        for program in programs:
            program.initial_state, program.models, program.optimizers = program.state(), models, optimizers
            own = {id(module): module for _, module in plain_modules(program.model)}
            models.append(at_end.enter_context(ModelSnapshot(program.model, own.values())))
        try:
            yield programs
        finally:
            for optimizer in optimizers.values():
                optimizer.close()


def values_of(program: Program) -> dict[str, Tensor]:
    """The compared parameters as whole tensors."""
    return {name: whole(parameter) for name, parameter in program.named().items()}


def follow(program: Program, values: Tensors) -> None:
    """Writes the parameters of another run into the trained parameters."""
    with torch.no_grad():
        for name, parameter in program.named().items():
            value = values.get(name)
            if value is not None and parameter.requires_grad:
                parameter.copy_(laid_out_as(parameter, value))


def state_of(program: Program) -> State:
    """State of the model and of the batch, because a model may write into the batch."""
    return {**program.state(), ("", "batch", "attribute"): plain_copy(list(program.batches.values()))}


def input_gradients(batches: Mapping[str, object]) -> Iterator[tuple[str, Tensor | None]]:
    """Gradients of the leaves of the batch that require one, by path in the batch."""
    for name, batch in batches.items():
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad:
                yield name + keystr(path), leaf.grad
