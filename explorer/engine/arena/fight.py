"""One bout on real steps, in the process that it is called in: judged first, then its peak.

judge     baseline ─▶ candidate ─▶ (only where they differ) baseline again, float64
peak      one step of the candidate under the allocator's recording alone
time      baseline, candidate, baseline, candidate, ... with nothing attached: of a rival that is no policy

A policy is judged by all that training carries on; a rival that rebuilds the model by the gradients of one step, as its
modules are others.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import msgspec

from explorer.engine.arena.contestant import Contestant
from explorer.engine.compare.carried import carried
from explorer.engine.compare.compare import runs_strictly, side_by_side
from explorer.engine.compare.outcome import Outcome, Yardsticks, take
from explorer.engine.compare.reference import coarsest_epsilon, reference
from explorer.engine.device.allocator import peak_bytes
from explorer.engine.device.device import Device, device_of
from explorer.engine.device.first_step import first_step
from explorer.engine.device.heap import without_page_faults
from explorer.engine.device.limits import failure_in_step
from explorer.engine.device.tf32 import without_tf32
from explorer.engine.measure.limited import held_bytes, limited_step, run_limited
from explorer.engine.measure.measure import warm_checkpoint
from explorer.engine.measure.stopwatch import step_ms
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded
from explorer.engine.step import Trainee, prepare, run_step, torch_device
from explorer.engine.world.as_found import left_as_found
from explorer.engine.world.determinism import deterministic_kernels
from explorer.errors import BadInput, ExplorerError
from explorer.plan.arena.table import rivals
from explorer.record.arena import Bout, Ground
from explorer.record.comparison import Comparison
from explorer.record.diffs import TensorDiff
from explorer.record.failure import is_out_of_memory
from explorer.record.measurement import Measurement
from explorer.record.progress import Progress, Report
from explorer.record.run import RunSpec
from explorer.record.times import Samples


def fight(spec: RunSpec, bout: Bout, ground: Ground, report: Report) -> Bout:
    """`bout` with what real steps said of it; `spec` keeps everything. What its steps raise is its failure.

    Raises what loading the model raises.
    """
    with left_as_found(), warnings.catch_warnings(action="ignore"):
        warm_checkpoint(torch_device(spec))  # before any limit: it starts threads, whose stacks count
        ring = _Ring(spec, bout, ground, load_for(spec))
        total = 2 + (spec.n_repeats if bout.policy is None else 0)
        try:
            report(Progress(what="judging its gradients", done=0, total=total))
            fought = msgspec.structs.replace(bout, **ring.judged())
            report(Progress(what="recording its memory", done=1, total=total))
            trainee, peak = ring.recorded()
            fought = msgspec.structs.replace(fought, step_peak_bytes=peak)
            if bout.policy is not None:
                return fought  # timed in turns with all others

            def meter(i: int) -> None:
                report(Progress(what=f"timing step {i + 1} of {spec.n_repeats}", done=2 + i, total=total))

            return fought.with_times(*ring.timed(trainee, meter))
        except BadInput as error:
            return msgspec.structs.replace(bout, why=error.sentence)
        except Exception as error:  # whatever a model raises under a stranger's hands
            if isinstance(error, ExplorerError) and not is_out_of_memory(error):
                raise
            return msgspec.structs.replace(bout, failure=failure_in_step(error))


class _Ring:
    """Where one bout takes place. Every trainee is fresh, from the one state that was loaded."""

    def __init__(self, spec: RunSpec, bout: Bout, ground: Ground, loaded: Loaded) -> None:
        self._spec, self._bout, self._ground, self._loaded = spec, bout, ground, loaded
        self._device: Device = device_of(torch_device(spec))
        self._baseline_fits = True

    def judged(self) -> dict[str, Any]:
        """Verdict and worst tensor, and what the rival foresees."""
        strict = runs_strictly(self._spec)
        with deterministic_kernels(strict=strict), without_tf32():
            base = self._baseline_outcome()
            contestant, outcome = first_step(
                self._device, self._contestant, lambda one: self._taken(one.trainee, lead=base)
            )
            fields: dict[str, Any] = {"why": contestant.note}
            if contestant.predicted_peak_bytes is not None:
                fields["predicted_peak_bytes"] = contestant.predicted_peak_bytes
            if base is None:
                note = "Not judged and without a ratio: the step with everything kept does not fit."
                return {**fields, "why": " ".join(filter(None, (contestant.note, note)))}
            comparison = self._compared(base, outcome, exactly=False)
            if comparison.verdict != "bitwise equal":
                comparison = self._compared(base, outcome, exactly=True)
        return {**fields, "verdict": comparison.verdict, "worst": _worst(comparison)}

    def recorded(self) -> tuple[Trainee, int]:
        """A contestant that has warmed up, and the peak of its next step."""
        self._device.release()
        trainee = self._contestant().trainee
        for _ in range(2):
            run_limited(self._device, trainee)
        self._device.release()
        trainee.model.zero_grad(set_to_none=True)
        base_bytes, recorder = held_bytes(trainee), self._device.recorder()
        with recorder:
            run_limited(self._device, trainee)
        log = recorder.log
        return trainee, peak_bytes(log, base_bytes if log.base_bytes is None else log.base_bytes)

    def timed(self, trainee: Trainee, meter: Callable[[int], None]) -> tuple[Samples, Samples]:
        """Steps of the contestant, in turns with those of the baseline where that fits."""
        clock = self._device.clock()
        baseline = self._keeping_all() if self._baseline_fits else None
        both = [one for one in (baseline, trainee) if one is not None]
        taken: dict[int, list[float]] = {id(one): [] for one in both}
        with without_page_faults(), self._device.limited_again(self._spec.memory_limit_bytes):
            for one in both:
                run_step(one)
            for i in range(self._spec.n_repeats):
                meter(i)
                for one in both:
                    taken[id(one)].append(step_ms(one, clock)["step"])
        step, baseline_step = (tuple(taken.get(id(one), ())) for one in (trainee, baseline))
        return Samples(ms=step), Samples(ms=baseline_step)

    @property
    def _full(self) -> bool:
        return self._bout.policy is not None

    def _taken(self, trainee: Trainee, lead: Outcome | None = None, like: Outcome | None = None) -> Outcome:
        with limited_step(self._device, trainee):
            return take(trainee, full=self._full, lead=lead, like=like)

    def _contestant(self) -> Contestant:
        """Raises BadInput where the rival cannot take part."""
        if self._bout.policy is not None:
            spec = msgspec.structs.replace(self._spec, policy=self._bout.policy)
            return Contestant(trainee=prepare(spec, self._loaded))
        module = importlib.import_module(f"explorer.engine.arena.{rivals()[self._bout.rival].module}")
        make: Callable[[Trainee, Bout, Ground], Contestant] = module.contestant
        return make(prepare(self._spec, self._loaded), self._bout, self._ground)

    def _baseline_outcome(self) -> Outcome | None:
        """None where the step with everything kept is out of memory."""
        try:
            return first_step(self._device, self._keeping_all, self._taken)[1]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._baseline_fits = False
            return None

    def _keeping_all(self) -> Trainee:
        return prepare(self._spec, self._loaded)

    def _compared(self, base: Outcome, outcome: Outcome, *, exactly: bool) -> Comparison:
        rerun, exact = base, None
        if exactly:
            rerun = self._taken(self._keeping_all(), like=base)
            exact, _ = reference(self._spec, self._loaded, base)
        yardsticks = Yardsticks(coarsest_epsilon(self._spec, base.gradients), rerun, exact)
        environment = self._device.environment(self._spec.n_threads)
        run = Measurement(spec=self._spec, environment=environment)
        fields = side_by_side(base, outcome, yardsticks)
        if self._full:
            fields["carried"] = carried(base, outcome, yardsticks, ())
        else:
            fields |= {"parameters": (), "rng": (), "eval_output": None}
        return Comparison(baseline=run, candidate=run, **fields)


def _worst(comparison: Comparison) -> str:
    worst: TensorDiff | None = comparison.worst
    if worst is None:
        return ", ".join(comparison.moved_twice[:3])
    far = "" if worst.relative_norm is None else f": {worst.relative_norm:.1e} of its norm away"
    return f"{worst.name}{far}"
