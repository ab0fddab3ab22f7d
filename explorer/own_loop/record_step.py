"""`with explorer.record_step(model, optimizer) as run:` around one step of the caller's own loop.

The result is a run like a measured one: the page opens its file, the Runs list keeps it, every policy can be forecast
from it. Demand: https://github.com/pytorch/pytorch/issues/32101
"""

from __future__ import annotations

import os
import sys
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from explorer.engine.measure.live import LiveStep
from explorer.errors import BadInput, NotSaved
from explorer.jobs.run_file import stored_record, write
from explorer.plan.forecast.forecast import Forecaster
from explorer.plan.memory.ledger import ledger
from explorer.plan.planners.budget import Planner, parse_budget
from explorer.record.forecast import Forecast
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan
from explorer.record.policy import Policy
from explorer.view.memory.sketch import sketch

if TYPE_CHECKING:
    import torch
    from torch import nn

MIB = 2**20
_MOST_LINES = 4


class RecordedStep:
    """The step between enter and exit. What the step raises passes through; the run until then is kept."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, where: str) -> None:
        self._live = LiveStep(model, optimizer, where)
        self._measurement: Measurement | None = None

    def __enter__(self) -> Self:
        if self._measurement is not None:
            raise BadInput("This step has been recorded already.", hint="Call explorer.record_step once a step.")
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)
        self._measurement = self._live.measurement

    @property
    def measurement(self) -> Measurement:
        """The record, of origin `recorded`. Raises BadInput before the step has ended."""
        if self._measurement is None:
            raise BadInput("The step has not been recorded yet.", hint="Read the run behind the `with` block.")
        return self._measurement

    @property
    def peak_bytes(self) -> int:
        """Most bytes held during the step; of a step that raised, until then. Origin: recorded."""
        return self.measurement.held_peak_bytes or 0

    def why(self) -> tuple[str, ...]:
        """What the peak is made of, largest first: one sentence a role, with the blocks that hold most of it."""
        at = ledger(self.measurement)
        where = f"the recompute of {at.phase_block}" if at.phase_block else at.phase or "before the step"
        sentences = [f"The peak of {_mib(at.total_bytes)} lies in {where}."]
        for role, n_bytes in sorted(at.by_role.items(), key=lambda item: -item[1])[:_MOST_LINES]:
            if n_bytes:
                blocks = [cell for cell in at.cells if cell.role == role][:2]
                held = ", ".join(f"{cell.block or 'the model itself'} {_mib(cell.n_bytes)}" for cell in blocks)
                sentences.append(f"{role}: {_mib(n_bytes)}, most of it in {held}.")
        return tuple(sentences)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the run file that the page's Runs list imports: whole or not at all. Raises NotSaved."""
        target = Path(path)
        part = target.with_name(f"{target.name}.part")
        try:
            part.write_bytes(write(stored_record(self.measurement)))
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise NotSaved(f"{target} could not be written: {error.strerror}.", hint="Give another path.") from error
        return target

    def forecast(self, policy: Policy) -> Forecast:
        """What `policy` should do to this step; nothing runs. Origin: predicted."""
        return Forecaster(self.measurement, self.measurement.graph).forecast(policy)

    def plan(self, budget: str) -> Plan:
        """The cheapest policy whose step stays below `budget`: `8GiB`, or `60%` of the peak with everything kept.

        Its `policy` goes to explorer.apply_policy. Raises BadInput below what can be reached, with what that is.
        """
        graph = self.measurement.graph
        assert graph is not None, "every recorded step has its graph"
        planner = Planner(self.measurement, graph)
        return planner.within(parse_budget(budget, planner.keep_all_bytes))

    def _repr_html_(self) -> str:
        """For a notebook's cell."""
        return escape(repr(self)) if self._measurement is None else sketch(self._measurement, repr(self).splitlines())

    def __repr__(self) -> str:
        if self._measurement is None:
            return "RecordedStep(not recorded yet)"
        run = self._measurement
        cut = "" if run.failure is None else f", then it failed: {run.failure.sentence}"
        head = f"Recorded step of {run.recorded_in}: at least {_mib(self.peak_bytes)}{cut}" if cut else (
            f"Recorded step of {run.recorded_in}: peak {_mib(self.peak_bytes)}"
        )  # fmt: skip
        again = sum(cost.n_recompute > 0 for cost in run.blocks)
        ran = f"{again} blocks ran again for backward." if again else "No block ran again for backward."
        return "\n  ".join([head, *self.why(), ran])


def record_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> RecordedStep:
    """Records the training step inside the `with` block: phases, every allocation, FLOPs, blocks that ran again.

    Nothing of the caller's changes: weights, generators, modes, hooks and gradients are bitwise as without it; other
    steps cost nothing. Raises BadInput (at `with`) where another profiler or dispatch mode is on, and for a model on
    another device than cpu or cuda.
    """
    frame: Any = sys._getframe(1)
    return RecordedStep(model, optimizer, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.1f} MiB"
