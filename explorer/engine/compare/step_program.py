"""A user's own step: each run trains the user's own model, restored in place.

A copy of a compiled or sharded model differs, so the model is not copied; the step runs its optimizer itself. Its
further evidence: settings of the optimizers, the first block that differs in forward, ties, and departures.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from explorer.engine.compare.diffs import Tensors, is_floating
from explorer.engine.compare.outcome import float64_distance, same_gradients
from explorer.engine.compare.programs import AsBaseline, Outcome, Outcomes, Stage
from explorer.engine.compare.watched import Forwards, RerunDraws, forward_difference
from explorer.engine.model.equal_models import copy_batch, plain_buffers, plain_modules, plain_parameters
from explorer.engine.state.bits import is_sparse_equal, laid_out_as, tensor_leaves, whole
from explorer.engine.state.snapshot import ModelSnapshot, OptimizerSnapshot
from explorer.engine.state.state_diff import State, StateKey, read_state
from explorer.engine.watch.modes import compiler_off
from explorer.engine.watch.scopes import after_closure
from explorer.record.comparison import Comparison, ForwardDiff
from explorer.record.late_read import Departure

Step = Callable[[nn.Module, object], object]
"""One training step: runs forward and backward of a model on a batch, both arguments."""


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
    as_baseline: AsBaseline = field(default_factory=AsBaseline)
    formats: set[torch.dtype] = field(default_factory=set)
    """Floating types of the outputs of all modules in the observed run."""
    stepped: bool = False
    """Whether an optimizer of torch stepped in the last step, on gradients that stood when it began."""
    rerun_is_first = True
    left_behind = ""
    moved_by_backward = frozenset[StateKey]()
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

    def without_policy(self) -> None:
        """None: a recompute in the step is the user's own."""

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
            leaves = filter(is_floating, tensor_leaves(output))
            self.formats.update(leaf.dtype for leaf in leaves)

        with register_module_forward_hook(look):
            yield

    def further_evidence(
        self, of: Comparison, baseline: Self, runs: Outcomes, exact: Outcome | None, stage: Stage
    ) -> Comparison:
        """Other settings of the optimizers and, if gradients differ, where forward and recomputes part."""
        pairs = (
            (key[1], *pair)
            for key, settings in baseline.settings.items()
            for pair in zip(settings, self.settings.get(key, ()))
            if pair[0] != pair[1]
        )
        of = replace(of, optimizer_settings=tuple(dict.fromkeys(pairs)))
        if same_gradients(*runs):
            return of
        forward, untied = _forward_difference(baseline, self), _untied(baseline, self)
        of = replace(of, forward=forward, untied=untied, departures=self.departures())
        return replace(of, float64_distance=float64_distance(self, exact, runs[0]) if exact else None)

    def departures(self) -> tuple[Departure, ...]:
        """Where recomputes depart from forward, from one watched step; empty for a compiled program."""
        if _is_compiled(self):
            return ()
        draws = RerunDraws(self.model)
        with suppress(Exception):  # the step may fail as it did before: what was seen until then counts
            self.start()
            with draws:
                self.step(self.model, self.batches["batch"])
        return tuple(draws.departures.by_block.values())


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


def _is_compiled(program: StepProgram) -> bool:
    modules = list(program.model.modules())
    return any(hasattr(thing, "_torchdynamo_orig_callable") for thing in (program.step, *modules)) or any(
        module._compiled_call_impl is not None for module in modules
    )


def _forward_difference(*programs: StepProgram) -> ForwardDiff | None:
    """The forward difference, from one watched step of each; None if a program is compiled or fails."""
    sides = []
    for program in programs:
        if _is_compiled(program):
            return None
        forwards = Forwards(program.model)
        try:
            watched = dataclasses.replace(program).start()  # a program keeps the settings that its own run has read
            with forwards.watching():
                watched.step(watched.model, watched.batches["batch"])
        except Exception:  # a hook may fail in a compiled or sharded model: the verdict does not need this evidence
            return None
        sides.append(forwards)
    return forward_difference(*sides)


def _untied(*programs: StepProgram) -> tuple[str, ...]:
    """Names that share a parameter in one program alone."""
    ties: list[set[frozenset[str]]] = []
    for program in programs:
        names_of: dict[nn.Parameter, set[str]] = defaultdict(set)
        for name, parameter in program.named().items():
            names_of[parameter].add(name)
        ties.append({frozenset(names) for names in names_of.values() if len(names) > 1})
    return tuple(sorted({name for names in ties[0] ^ ties[1] for name in names}))
