"""The step of a RunSpec: each run trains a new copy of a loaded model.

Its further evidence: masks and module state at recompute, values that recomputes read, and a run without early stop.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from explorer.engine.bench.bench import Bench, bench_of
from explorer.engine.bench.memory import FirstPeak
from explorer.engine.bench.step import OnPhase, Trainee, autocast, forward_backward, ignore, optimizer_step, prepare
from explorer.engine.compare.diffs import Tensors, is_floating
from explorer.engine.compare.outcome import outcome_of, same_gradients
from explorer.engine.compare.programs import AsBaseline, Outcome, Outcomes, Stage
from explorer.engine.compare.watched import RerunWatch, StateAudit, late_reads
from explorer.engine.device.device import device_of
from explorer.engine.model.conditions import AUTOCAST
from explorer.engine.model.loaded import Loaded, call
from explorer.engine.state.rng import seed_everything
from explorer.engine.state.snapshot import SharedSnapshot
from explorer.engine.state.state_diff import State, StateKey, read_state
from explorer.engine.watch.checkpoint_error import failure_in_words
from explorer.errors import Cancelled
from explorer.record.comparison import Comparison
from explorer.record.late_read import Departure
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec


def formats_of(spec: RunSpec) -> set[torch.dtype]:
    """Floating types of a run beside those of its gradients."""
    return {AUTOCAST[spec.autocast]} if spec.autocast != "none" else set()


class SpecProgram:
    """`start` makes a new copy of `loaded`, which never runs itself; `end` frees the copy."""

    stepped: bool | None = None
    no_float64_because = ""
    initial_state: State = {}
    rerun_is_first = False

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
        self.moved_by_backward = frozenset[StateKey]()
        self.formats = formats_of(spec)
        self.as_baseline = AsBaseline()

    def under(self, spec: RunSpec) -> SpecProgram:
        """The program of another spec of the same model."""
        return SpecProgram(spec, self._loaded, self._shared)

    def in_float64(self) -> SpecProgram:
        """The same steps without a policy, in float64."""
        return self.under(replace(self.spec, dtype="float64", autocast="none", policy=KEEP_ALL, plan=None))

    def without_policy(self) -> SpecProgram:
        return self.under(replace(self.spec, policy=KEEP_ALL, plan=None))

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
    def left_behind(self) -> str:
        """Why the copy does not stand for the model; empty: it does."""
        return self.trainee.left_behind

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

    def departures(self) -> tuple[Departure, ...]:
        """None: the recorded step has shown them."""
        return ()

    def further_evidence(
        self, of: Comparison, baseline: Self, runs: Outcomes, exact: Outcome | None, stage: Stage
    ) -> Comparison:
        """Masks and state changes at recompute, and a run to the end of each recompute if one drew less.

        Unless the warm-up was watched, a separate step is, and is not compared. A run for evidence may fail where the
        candidate did not: the tensors of the candidate decide the verdict without the evidence.
        """
        if not self.spec.policy.units:
            return of
        if not of.masks_watched:
            stage("candidate, watched: masks and module state")
            with suppress(Exception):
                self.start()
                watch = RerunWatch(self.model, self.spec.policy)
                with watch:
                    forward_backward(self.trainee, watch.on_phase)
                self.end()
                of = watch.added_to(of)
        if of.late_reads:
            stage("candidate, two steps: what its recomputes read")
            of = replace(of, late_reads=late_reads(self.start().trainee))
            self.end()
        if self.spec.policy.stops_early and any(mask.n_not_drawn_again for mask in of.masks):
            program = self.under(replace(self.spec, policy=replace(self.spec.policy, early_stop=False)))
            try:
                again = outcome_of(program.start(), full=False, like=runs[0])
                of = replace(of, equal_without_early_stop=same_gradients(runs[0], again))
            except Cancelled:
                raise
            except Exception as error:
                sentence = failure_in_words(error, program.model).sentence
                of = replace(of, equal_without_early_stop=False, fails_without_early_stop=sentence)
        return of
