"""Judges levers by real steps of both programs on this machine: what each does to the gradients.

fit.py plays the levers. compare.py judges policies of one RunSpec, on copies of one model; here all else may differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property

import torch
from msgspec.structs import replace
from torch import nn
from torch.utils._pytree import tree_map

from explorer.engine.bench.step import Trainee, forward_backward, ignore, optimizer_step, trainee_of
from explorer.engine.compare.judgement import judge_programs
from explorer.engine.compare.step_program import StepProgram, step_programs
from explorer.engine.device.device import device_of
from explorer.engine.device.without_data import without_data
from explorer.engine.model.adapters import parts_of
from explorer.engine.model.equal_models import same_parameters
from explorer.engine.model.load import load_for, takes_argument
from explorer.engine.model.loaded import types_of
from explorer.engine.model.loss_chunks import logits_of
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state
from explorer.errors import Cancelled, TimedOut, message_of
from explorer.plan import lever_text, levers
from explorer.plan.names import listed
from explorer.plan.why.gradients import causes
from explorer.record.comparison import Comparison
from explorer.record.fit import Effect, Judgement, LeverRow
from explorer.record.measurement import Measurement
from explorer.record.plan import Progress, Report
from explorer.record.run import RunSpec

EFFECTS: dict[str, Effect] = {"bitwise equal": "bitwise", "rounding": "rounding", "not comparable": "not judged"}
BY_HALVES = "Each half is computed alone: the model draws random numbers, or its loss is no mean over samples."
NO_SIZE = "No size of the model can be run here in a few seconds."


def outline_of(spec: RunSpec) -> tuple[levers.Parts, dict[str, str]]:
    """What levers change of the model of `spec`, and the class of each module."""
    with preserve_global_state(), without_data():
        loaded = load_for(spec)
        last, text = logits_of(loaded)
    kinds = {name: type(module).__name__ for name, module in loaded.model.named_modules()}
    parts = parts_of(loaded.model, has_attention=takes_argument(spec.model, levers.ATTENTION))
    return parts._replace(last=last, logits_text=text), kinds


class Judge:
    """Real steps of a small spec as it is, and under levers."""

    def __init__(self, small: RunSpec | None, report: Report) -> None:
        self._report = report
        self._parts, self._kinds = (levers.Parts(), {}) if small is None else outline_of(small)
        self._baseline = None if small is None else SpecBaseline(small)

    def judged(self, row: LeverRow) -> LeverRow:
        """`row` with what comparing real steps found; why nothing was judged where they cannot run."""
        if self._baseline is None:
            return replace(row, judgement=Judgement(reason=NO_SIZE))
        self._report(Progress(what=f"judging {lever_text.title(row)}", done=0, total=0))
        try:
            return replace(row, judgement=self._judgement(self._baseline, row))
        except (Cancelled, TimedOut):
            raise
        except Exception as error:  # a user's model may raise anything in another type or form
            return replace(row, judgement=Judgement(reason=f"The small step failed: {message_of(error)}."))

    def _judgement(self, baseline: SpecBaseline, row: LeverRow) -> Judgement:
        small = baseline.spec
        policy, note = row.step.spec.policy, ""
        if levers.RECOMPUTE in row.levers:
            units = tuple(unit for unit in policy.units if self._kinds.keys() >= set(unit.blocks))
            if len(units) < len(policy.units):
                note = f"The judged model has {len(units)} of the {len(policy.units)} units that are recomputed."
            policy = replace(policy, units=units)
            if not units:
                return Judgement(reason=note)
        changed = levers.under(small, row.levers, self._parts, policy)
        if changed == small and levers.ALLOCATOR.keys() >= set(row.levers):
            return Judgement(effect="bitwise", reason="The program stays as it is; only addresses change.")
        if changed == small:
            return Judgement(reason="The judged model has nothing that the lever changes.")
        comparison = baseline.compared(changed)
        worst = comparison.worst
        return Judgement(
            effect=EFFECTS.get(comparison.verdict, "different"),
            distance=None if worst is None else worst.relative_norm,
            reason=" ".join(filter(None, (self._reason(comparison, changed), note))),
        )

    def _reason(self, comparison: Comparison, changed: RunSpec) -> str:
        """Why the steps differ or are not comparable. Causes of a comparison ask for faults that no lever has."""
        small = comparison.baseline.spec
        if comparison.failure is not None:
            return comparison.failure.sentence
        if comparison.verdict in ("bitwise equal", "rounding", "not comparable"):
            return comparison.not_reproducible_because
        if changed.lora is not None or changed.frozen != small.frozen:
            return "Other parameters are trained."
        if changed.dtype != small.dtype:
            return f"Parameters are rounded to {changed.dtype} before the first step."
        if comparison.optimizer_settings:
            name, before, after = comparison.optimizer_settings[0]
            return f"The optimizer makes another step of the gradients: {name} is {after} instead of {before}."
        if changed.autocast != small.autocast:
            return f"Products are made in {changed.autocast}, which rounds more."
        if changed.n_accumulation != small.n_accumulation:
            kinds = dict.fromkeys(kind for kind in self._kinds.values() if "Dropout" in kind or "BatchNorm" in kind)
            return f"Each half is computed alone, and the model has {listed([*kinds])}." if kinds else BY_HALVES
        return next(iter(comparison.causes), "")


class _Program:
    """A trainee as a program of `explorer.judge`."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self.batch = trainee.inputs, trainee.targets

    def step(self, model: nn.Module, batch: object) -> torch.Tensor:
        """One step of the trainee on `batch`, in the types of the trainee or in float64; its loss."""
        trainee = self._trainee
        trainee.inputs, trainee.targets = tree_map(_in_type_of, batch, self.batch)
        loss = forward_backward(trainee)
        optimizer_step(trainee, ignore)
        return torch.tensor(loss)


def _in_type_of(leaf: object, like: object) -> object:
    if not isinstance(leaf, torch.Tensor) or not isinstance(like, torch.Tensor) or leaf.dtype == torch.float64:
        return leaf
    return leaf.to(like.dtype)


class SpecBaseline:
    """Real steps of a spec, which run once for all specs that are compared with it."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._open = ExitStack()
        self._programs: dict[tuple[str, ...], tuple[StepProgram, Measurement]] = {}
        """The steps and their entry in a comparison, by the names of the parameters that are compared."""

    @cached_property
    def _unchanged(self) -> nn.Module:
        return load_for(self.spec).model

    def compared(self, candidate: RunSpec) -> Comparison:
        """The steps of `candidate`, whose model begins with equal parameters, compared tensor by tensor.

        Raises BadInput if the parameters differ, and the errors of the baseline.
        """
        with preserve_global_state(), deterministic_kernels(), warnings.catch_warnings(action="ignore"):
            loaded = load_for(candidate)
            names = same_parameters(self._unchanged, loaded.model)
            if names not in self._programs:
                trainee = trainee_of(self.spec, load_for(self.spec))
                self._programs[names] = self._open.enter_context(_program(trainee, names)), _entry(trainee)
            baseline, entry = self._programs[names]
            trainee = trainee_of(candidate, loaded)
            with _program(trainee, names) as program:
                comparison = judge_programs(Comparison(baseline=entry, candidate=_entry(trainee)), baseline, program)
            trainee.handle.undo()
        return replace(comparison, causes=causes(comparison))


@contextmanager
def _program(trainee: Trainee, names: tuple[str, ...]) -> Iterator[StepProgram]:
    """The steps of a trainee, whose generators were just seeded."""
    each = _Program(trainee)
    with step_programs([(each.step, trainee.model)], each.batch, names) as (program,):
        yield program


def _entry(trainee: Trainee) -> Measurement:
    """A Measurement without readings, as a program's entry in a comparison."""
    environment = device_of(trainee.device).environment(trainee.spec.n_threads)
    return Measurement(spec=trainee.spec, environment=environment, dtype=types_of(trainee.model))
