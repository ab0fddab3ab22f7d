"""`with explorer.record_step(model, optimizer) as run:` around one step of the caller's loop.

The result is like a measured run: the page opens its file, the Runs list stores the run, every policy can be forecast.
Every rank of a training imports this file: planner, forecasts and the report are imported where they are asked for.
Demand: https://github.com/pytorch/pytorch/issues/32101
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from explorer.engine.bench.memory import Optimizers
from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.device.device import path_of_rank
from explorer.engine.policy.several_models import Models, one_model
from explorer.errors import BadInput, message_of
from explorer.plan.names import outermost
from explorer.record.card import CardMemory
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast, Plan
from explorer.record.policy import Policy

if TYPE_CHECKING:
    from explorer.record.fit import Fit


class RecordedRun:
    """A recorded step, or the reason why there is no recording."""

    _why_not = "The step has not been recorded yet."

    def __init__(self, measurement: Measurement | None = None) -> None:
        self._measurement = measurement

    @property
    def measurement(self) -> Measurement:
        """The record, of origin `recorded`. Raises BadInput before the step has ended."""
        if self._measurement is None:
            raise BadInput(self._why_not, hint="Read the run behind the `with` block of a step that is recorded.")
        return self._measurement

    @property
    def peak_bytes(self) -> int:
        """Most bytes held during the step, or until the error of a step that raised. Origin: recorded."""
        return self.measurement.held_peak_bytes or 0

    def scalars(self) -> dict[str, float]:
        """Figures for a training's own log: bytes, and how many blocks ran again. Unknown figures are left out."""
        run = self.measurement
        reserved = run.peaks.steady_reserved_peak_bytes or run.peaks.reserved_peak_bytes
        figures = {
            "memory/peak_bytes": run.held_peak_bytes,
            "memory/reserved_bytes": reserved,
            "memory/saved_after_forward_bytes": run.saved_after_forward_bytes,
            "recompute/blocks": len(_ran_again(run)),
            "recompute/flops": run.recompute_flops,
        }
        return {name: float(value) for name, value in figures.items() if value is not None}

    def why(self) -> tuple[str, ...]:
        """Sentences on the peak's moment, its parts, and ways to lower the peak, most important first."""
        from explorer.plan.why.peak import explain_one

        return explain_one(self.measurement)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the run file for the page's Runs list, whole or not at all. Raises NotSaved.

        Under torchrun each rank writes a file, `step.rank3.explorer`. Returns the path that was written.
        A step without a recording is a warning, here and in `report`, so that the training goes on.
        """
        from explorer.jobs.run_file import stored_record, write

        return self._written(path, lambda run: write(stored_record(run)))

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes one HTML file to share, which needs no server and no network. Raises NotSaved."""
        from explorer.view.report.report import ReportOf, report_text

        return self._written(
            path, lambda run: report_text(ReportOf(run=run, name=run.recorded_in, created=time.time())).encode()
        )

    def _written(self, path: str | os.PathLike[str], content: Callable[[Measurement], bytes]) -> Path:
        if self._measurement is None:
            warnings.warn(f"{path} is not written. {self._why_not}", stacklevel=3)
            return Path(path)
        from explorer.jobs.run_file import write_file

        return write_file(path_of_rank(Path(path)), content(self._measurement))

    def forecast(self, policy: Policy) -> Forecast:
        """The forecast of `policy` for the steps that follow. No step runs. Origin: predicted.

        The first step of a training makes the optimizer's state, which later steps hold from their start.
        """
        from explorer.plan.predict.forecaster import Forecaster

        return Forecaster(self.measurement, self.measurement.graph).forecast(policy)

    def plan(self, budget: str) -> Plan:
        """The cheapest policy under which the next steps stay below `budget`: `8GiB`, `60%` of their peak.

        `+10 % time` is the least memory in that time.

        Pass its `policy` to explorer.apply_policy. Raises BadInput, with the least peak, for a budget below this peak.
        """
        from explorer.plan.budget_text import parse_budget
        from explorer.plan.planners.planner import Planner

        graph = self.measurement.graph
        assert graph is not None, "every recorded step has its graph"
        planner = Planner(self.measurement, graph)
        return planner.fulfil(parse_budget(budget, planner.keep_all_bytes, self.measurement))

    def on_card(self, card: str, *, allocator: str = "", n_steps: int = 12) -> CardMemory:
        """What this training would hold on a GPU, `b200` or `24GiB`, by torch's allocator. Origin: simulated.

        Lifetimes are those of the record. A step that ran on the CPU has the tensors of the CPU's kernels.
        `allocator` is PYTORCH_CUDA_ALLOC_CONF, `n_steps` the most that are played if they do not repeat. Raises
        BadInput for an unknown card, for options that cannot be read, and for offloaded blocks on a CPU.
        """
        from explorer.plan.card.cards import parse_card
        from explorer.plan.card.step_on_card import memory_on
        from explorer.plan.memory.next_step import next_step
        from explorer.plan.why.caveats import stayed_on_cpu

        run = self.measurement
        if sentence := stayed_on_cpu(run):
            raise BadInput(sentence, hint="Or record it without the policy, and compare the model.")
        following = next_step(run)
        first = None if following is run else run
        return memory_on(replace(parse_card(card), options=allocator, n_steps=n_steps), following, first)

    def fit(self, card: str | None = None, *, budget: str | None = None) -> Fit:
        """What would make this step fit a card, `h100`, or a budget, `8GiB`: policies, predicted. Prints the table.

        Raises BadInput for an unknown card, and for a budget that is neither a size nor a share of the peak.
        """
        from explorer.plan.card.cards import parse_card
        from explorer.plan.lever_text import table_text
        from explorer.plan.recorded_fit import recorded_fit

        fit = recorded_fit(self.measurement, None if card is None else parse_card(card), budget)
        print(table_text(fit))
        return fit

    def __repr__(self) -> str:
        if self._measurement is None:
            return self._why_not
        from explorer.plan.memory.next_step import next_step
        from explorer.plan.memory.reruns import self_checkpointing
        from explorer.plan.sizes import mib
        from explorer.plan.why.caveats import bytes_outside, peak_caveats
        from explorer.plan.why.checkpointing import checkpointing_lines
        from explorer.plan.why.peak import peak_of_next_step
        from explorer.view.drawing.units import count

        run = self._measurement
        cut = "" if run.failure is None else f", then it failed: {run.failure.sentence}"
        word = "peak at least" if bytes_outside(run) else "peak"
        if cut:
            word = "at least"
        head = f"Recorded step of {run.recorded_in}: {word} {mib(self.peak_bytes)}{cut}"
        if peak_of_next_step(run):
            head += f", the next step {mib(next_step(run).step_peak_bytes or 0)} (predicted)"
        again = len(_ran_again(run))
        ran = f"{count(again, 'block')} ran again for backward." if again else "No block ran again for backward."
        is_unknown = run.ran_compiled or bool(self_checkpointing(run))
        lines = [head, *self.why(), *([] if is_unknown else [ran]), *peak_caveats(run)]
        return "\n  ".join([*lines, *checkpointing_lines(run)])


def _ran_again(run: Measurement) -> list[str]:
    """The outermost blocks that ran again: a block and the modules inside it are one."""
    return outermost(cost.fqn for cost in run.blocks if cost.n_recompute)


class RecordedStep(RecordedRun):
    """The step between enter and exit. Errors of the step pass through, and the run until the error is kept."""

    def __init__(self, model: Models, optimizer: Optimizers, where: str) -> None:
        super().__init__()
        self._step = (model, optimizer, where)
        self._live: LoopRecording | None = None

    def __enter__(self) -> Self:
        try:
            if self._measurement is not None:
                raise BadInput("A step was recorded in it already.", hint="Call explorer.record_step once a step.")
            model, optimizer, where = self._step
            live = LoopRecording(one_model(model), optimizer, where)
            live.__enter__()
            self._live = live
        except Exception as trouble:
            self._unrecorded(trouble)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.__exit__(kind, error, traceback)
            run = live.measurement
            if error is None and run.allocations is not None and not any(run.allocations.born):
                raise BadInput(
                    "Nothing was allocated inside.", hint="Put a whole step inside: forward, backward, optimizer."
                )
            self._measurement = run
        except Exception as trouble:
            self._unrecorded(trouble)
        finally:
            with suppress(Exception):
                live.close()

    def _unrecorded(self, trouble: Exception) -> None:
        """Warns that the step is not recorded. An instrument never ends the training."""
        self._why_not = f"The step of {self._step[2]} is not recorded. {message_of(trouble)}."
        warnings.warn(self._why_not, stacklevel=3)


def record_step(model: Models, optimizer: Optimizers = None) -> RecordedStep:
    """Records the training step inside the `with` block: phases, every allocation, FLOPs, blocks that ran again.

    Several models of one step are given by name, `{"netG": netG, "netD": netD}`, and their optimizers as a list.
    A policy for them names blocks as `netG.main.3`; explorer.apply_policy takes the same models.

    Weights, generators, modes, hooks and gradients stay bitwise as without the recording. Other steps cost nothing. A
    step that cannot be recorded is a warning: another profiler or dispatch mode is on, the model is on another device
    than cpu or cuda, nothing was allocated inside, or an instrument failed.
    """
    return RecordedStep(model, optimizer, place_of_caller())


def place_of_caller() -> str:
    """`train.py:42`: the line of the user's call of the public function that calls this one."""
    frame = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
