"""A recorded step of the caller's loop: figures, reasons, forecasts, and a file for the page."""

from __future__ import annotations

import os
import time
import warnings
from html import escape
from pathlib import Path

from explorer.errors import BadInput, NotSaved
from explorer.jobs.run_file import stored_record, write
from explorer.plan.planners.budget import parse_budget
from explorer.plan.planners.planner import Planner
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.why.caveats import bytes_outside, peak_caveats, self_checkpointing
from explorer.plan.why.peak import explain_one
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast, Plan
from explorer.record.policy import Policy
from explorer.view.drawing.units import count, mib
from explorer.view.memory.timeline import sketch
from explorer.view.report.report import ReportOf, report_text


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

    def why(self) -> tuple[str, ...]:
        """Sentences on the peak's moment, its parts, and ways to lower the peak, most important first."""
        return explain_one(self.measurement)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the run file for the page's Runs list, whole or not at all. Raises NotSaved.

        A step without a recording is a warning, here and in `report`, so that the training goes on.
        """
        if self._measurement is None:
            warnings.warn(f"{path} is not written. {self._why_not}", stacklevel=2)
            return Path(path)
        return _written(Path(path), write(stored_record(self.measurement)))

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes one HTML file to share, which needs no server and no network. Raises NotSaved."""
        if self._measurement is None:
            warnings.warn(f"{path} is not written. {self._why_not}", stacklevel=2)
            return Path(path)
        of = ReportOf(run=self.measurement, name=self.measurement.recorded_in, created=time.time())
        return _written(Path(path), report_text(of).encode())

    def forecast(self, policy: Policy) -> Forecast:
        """The forecast of this step under `policy`. The step does not run. Origin: predicted."""
        return Forecaster(self.measurement, self.measurement.graph).forecast(policy)

    def plan(self, budget: str) -> Plan:
        """The cheapest policy whose step stays below `budget`: `8GiB`, or `60%` of the peak with everything kept.

        Pass its `policy` to explorer.apply_policy. Raises BadInput, with the least peak, for a budget below this peak.
        """
        graph = self.measurement.graph
        assert graph is not None, "every recorded step has its graph"
        planner = Planner(self.measurement, graph)
        return planner.within(parse_budget(budget, planner.keep_all_bytes, self.measurement))

    def _repr_html_(self) -> str:
        """HTML for a notebook's cell."""
        return escape(repr(self)) if self._measurement is None else sketch(self._measurement, repr(self).splitlines())

    def __repr__(self) -> str:
        if self._measurement is None:
            return self._why_not
        run = self._measurement
        cut = "" if run.failure is None else f", then it failed: {run.failure.sentence}"
        word = "at least" if cut else "peak at least" if bytes_outside(run) else "peak"
        head = f"Recorded step of {run.recorded_in}: {word} {mib(self.peak_bytes)}{cut}"
        again = sum(cost.n_recompute > 0 for cost in run.blocks)
        ran = f"{count(again, 'block')} ran again for backward." if again else "No block ran again for backward."
        return "\n  ".join([head, *self.why(), *([] if self_checkpointing(run) else [ran]), *peak_caveats(run)])


def _written(target: Path, content: bytes) -> Path:
    """Writes `content` to `target`, whole or not at all."""
    part = target.with_name(f"{target.name}.part")
    try:
        part.write_bytes(content)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise NotSaved(f"{target} could not be written: {error.strerror}.", hint="Give another path.") from error
    return target
