"""`explorer.judge(reference_step, candidate_step, model, batch)`: do two programs perform the same training step?

    verdict = explorer.judge(train_step, fused_step, model, batch)      # or: ..., candidate_model=torch.compile(model)
    print(verdict)
    verdict.require()                                                   # in a test: raises, and names the worst tensor

The verdict is that of `compare`: bitwise equal, rounding against float64, state moved, different, not comparable.
Loss equality is never part of it.

`explorer.audit(model, step)`: a model's built-in recompute, and whether the gradients stay the same.

a recorded step                          calls of a checkpoint, forwards inside backward that no policy ordered
a recorded step, checkpointing off       does a recompute remain?
judge(plain, with recompute)             the verdict; without a switch for recompute, random draws are compared
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from msgspec.structs import replace
from torch import nn

from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.compare.judgement import judge_programs
from explorer.engine.compare.step_program import Step, step_programs
from explorer.engine.compare.watched import RerunDraws
from explorer.engine.device.device import device_of, device_of_model
from explorer.engine.model.equal_models import same_parameters
from explorer.engine.model.loaded import types_of
from explorer.engine.policy.apply import checkpointing_off, policy_of
from explorer.engine.state.global_state import deterministic_kernels, preserve_global_state
from explorer.engine.state.snapshot import StepSnapshot
from explorer.engine.watch.modes import compiler_off
from explorer.errors import BadInput
from explorer.own_loop.record_step import place_of_caller
from explorer.plan.memory.reruns import checkpoints_itself, in_words, self_checkpointing
from explorer.plan.names import listed
from explorer.record.comparison import BufferDiff, Comparison, GradientDiff, ParameterDiff, TensorDiff, Verdict
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec

ORDER: tuple[Verdict, ...] = ("bitwise equal", "rounding", "state moved", "different", "not comparable")
_MOST_LINES = 8
_KINDS: dict[type[TensorDiff], str] = {GradientDiff: "gradient of", BufferDiff: "buffer", ParameterDiff: "parameter"}


class Judged:
    """The verdict on a candidate, and its evidence."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    @property
    def verdict(self) -> Verdict:
        return self.comparison.verdict

    @property
    def worst(self) -> tuple[TensorDiff, ...]:
        """Tensors that are not bitwise equal, the furthest first."""
        return self.comparison.furthest_first

    @property
    def causes(self) -> tuple[str, ...]:
        """Likely causes, each one sentence, most likely first. For a verdict "not comparable", the reason."""
        comparison = self.comparison
        failed = (f"The candidate did not run. {comparison.failure.sentence}",) if comparison.failure else ()
        unlike = (comparison.not_reproducible_because,) if comparison.not_reproducible_because else ()
        return (*failed, *unlike, *comparison.causes)

    def require(self, at_most: Verdict = "rounding") -> None:
        """Raises AssertionError, with the whole verdict in words, if the verdict is worse. For tests of a project."""
        if ORDER.index(self.verdict) > ORDER.index(at_most):
            raise AssertionError(str(self))

    def __repr__(self) -> str:
        from explorer.plan.why.checkpointing import sides

        comparison = self.comparison
        n_equal, n, what = comparison.n_bitwise_equal, comparison.n_gradients, "gradients are equal bit by bit"
        if not n:
            n_equal, n = sum(diff.bitwise for diff in comparison.parameters), len(comparison.parameters)
            what = "parameters are equal bit by bit after the steps, which leave no gradient"
        evidence = f"{n_equal} of {n} {what}"
        if not n:
            evidence = "nothing was compared"
        lines = [f"{self.verdict}: {evidence}", *sides(comparison, "reference"), *self.causes]
        later = {id(diff) for diff in comparison.later_gradients}
        lines += [_line(diff, is_later=id(diff) in later) for diff in self.worst[:_MOST_LINES]]
        left = len(self.worst) - _MOST_LINES
        return "\n  ".join([*lines, *([f"and {left} more"] if left > 0 else [])])


def judge(
    reference_step: Step,
    candidate_step: Step,
    model: nn.Module,
    batch: object,
    candidate_model: nn.Module | None = None,
) -> Judged:
    """Runs both programs from one state and compares their results tensor by tensor.

    Each step is called as `step(model, batch)`, twice in a row and with a copy of the batch. A step runs forward,
    backward and optionally an optimizer, and may return its loss. `candidate_model` (None: `model`) is the candidate's
    model: compiled, sharded, wrapped or rewritten, with parameters of the same names and values.
    Parameters, gradients, buffers, attributes, generators and optimizers are restored afterwards. Other state (a
    schedule, a loader, a scaler) is not. A reference that differs from itself for this reason is not comparable.
    Raises BadInput if the parameters differ, and the errors of the reference step.
    """
    models = model, model if candidate_model is None else candidate_model
    return judge_steps((reference_step, candidate_step), models, batch, place_of_caller())


def judge_steps(
    steps: tuple[Step, Step],
    models: tuple[nn.Module, nn.Module],
    batch: object,
    where: str,
    before_run: Callable[[], None] = lambda: None,
) -> Judged:
    """As `judge`. `where` names the programs; `before_run` restores state outside of model, batch and optimizers."""
    names = same_parameters(*models)
    baseline, candidate = (_run(where, model) for model in models)
    comparison = Comparison(baseline=baseline, candidate=candidate)
    with (
        preserve_global_state(),
        deterministic_kernels(),
        warnings.catch_warnings(),
        step_programs(list(zip(steps, models)), batch, names, before_run) as (reference, judged),
    ):
        comparison = judge_programs(comparison, reference, judged)
    is_compared = comparison.failure is None and not comparison.not_reproducible_because
    if is_compared and comparison.n_gradients == 0 and not comparison.trains_in_backward:
        raise BadInput(
            "Neither step left a gradient in the model that it was given.",
            hint="Let each step run backward, on the model and the batch that are its arguments.",
        )
    from explorer.plan.why.gradients import causes

    return Judged(replace(comparison, causes=causes(comparison)))


def _run(where: str, model: nn.Module) -> Measurement:
    """A Measurement without readings, as a program's entry in a comparison."""
    device = device_of(device_of_model(model))
    threads = torch.get_num_threads()
    spec = RunSpec(
        model=ModelRef(target=where),
        device="cuda" if device.torch.type == "cuda" else "cpu",
        n_repeats=0,
        n_threads=threads,
    )
    return Measurement(
        spec=spec,
        environment=device.environment(threads),
        origin="recorded",
        recorded_in=where,
        dtype=types_of(model),
    )


def _line(diff: TensorDiff, *, is_later: bool) -> str:
    what = "of the last step" if is_later else ""
    if isinstance(diff, ParameterDiff):
        what = "after the steps"
    name = f"{_KINDS.get(type(diff), '')} {diff.name} {what}".strip()
    if diff.presence in ("baseline only", "candidate only"):
        return f"{name}: of the {'reference' if diff.presence == 'baseline only' else 'candidate'} alone"
    far = f", off by {diff.max_abs:.4g}" if diff.relative_norm is None and diff.max_abs else ""
    far = far if diff.relative_norm is None else f", {diff.relative_norm:.2g} of its norm away"
    if isinstance(diff, ParameterDiff) and diff.step_distance is not None:
        return f"{name}: {diff.verdict}, {diff.step_distance:.2g} of its last step away"
    ratio = "" if diff.norm_ratio is None else f", {diff.norm_ratio:.4g} times as long"
    return f"{name}: {diff.verdict}{far}{ratio}"


class Audit:
    """The result of an audit."""

    def __init__(self, measurement: Measurement, judged: Judged | None, draws: RerunDraws | None) -> None:
        self.measurement = measurement
        """The recorded step with the model's checkpointing."""
        self.judged = judged
        """The model against itself with checkpointing off; None: no checkpointing, or no known switch."""
        self.other_draws: dict[str, int] = dict(draws.others) if draws is not None else {}
        """Random numbers drawn by the rerun and not by forward, by block."""
        self._n_drawn = draws.n_drawn if draws is not None else 0
        departures = draws.departures.by_block.values() if draws is not None else ()
        self.departure = next((departure.sentence for departure in departures), "")
        """Where the rerun first makes another tensor than forward; empty if it makes the same tensors."""

    @property
    def reruns(self) -> dict[str, float]:
        """Blocks that the model runs again without a policy, with the reruns per forward."""
        return self_checkpointing(self.measurement)

    @property
    def is_same(self) -> bool | None:
        """Whether the model trains like the plain model; None: no plain version could be built or compared."""
        if not checkpoints_itself(self.measurement):
            return True
        if self.judged is not None and self.judged.verdict != "not comparable":
            return self.judged.verdict in ("bitwise equal", "rounding")
        return False if self.other_draws else None

    def __repr__(self) -> str:
        from explorer.plan.why.checkpointing import checkpointing_lines

        again = f"{in_words(self.measurement)}." if self.reruns else "The model runs nothing again by itself."
        lines = [again, *checkpointing_lines(self.measurement)]
        if not checkpoints_itself(self.measurement):
            return "\n  ".join(lines)
        if self.judged is not None:
            lines.append(f"Against itself with that switched off: {self.judged}")
        else:
            lines.append("No known switch turns that off, so no plain version could be built to judge it against.")
        if self.other_draws:
            where = listed([fqn or "no block of its own" for fqn in self.other_draws])
            lines.append(
                f"The rerun draws random numbers that forward did not, in {where}: the gradients belong to another "
                "forward. Set the generators back before it runs again, as torch.utils.checkpoint does."
            )
        elif self._n_drawn:
            lines.append("The rerun draws the very random numbers of forward.")
        if self.departure:
            lines.append(self.departure)
        return "\n  ".join(lines)


def audit(model: nn.Module, step: Callable[[], object]) -> Audit:
    """Audits a few real steps of `step()` (forward, loss, backward; an optimizer or none) and restores all state.

    The step must use the same batch at each call. Raises BadInput for a model with a policy, and the step's errors.
    """
    where = place_of_caller()
    if policy_of(model).units:
        raise BadInput("The model carries a policy, whose recompute is not its own.", hint="Undo the policy first.")

    def plain_step() -> None:
        with checkpointing_off(model):
            step()

    with compiler_off(), preserve_global_state():
        before = StepSnapshot(model, step)
        try:
            as_it_is = _recorded(model, step, where)
            if not checkpoints_itself(as_it_is):
                return Audit(as_it_is, None, None)
            before.restore()
            with RerunDraws(model) as draws:
                step()
            before.restore()
            left = self_checkpointing(_recorded(model, plain_step, where))
        finally:
            before.restore()
    if left:
        return Audit(as_it_is, None, draws)
    try:
        sides = lambda model, batch: plain_step(), lambda model, batch: step()
        return Audit(as_it_is, judge_steps(sides, (model, model), None, where, before.restore), draws)
    finally:
        before.restore()


def _recorded(model: nn.Module, step: Callable[[], object], where: str) -> Measurement:
    live = LoopRecording(model, None, where)
    with live:
        step()
    return live.measurement
