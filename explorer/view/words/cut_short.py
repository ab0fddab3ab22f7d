"""A run that was cut short, in words: where it ended and how much it held until then.

at least 573.0 MiB, then refused        failed in the recompute of blocks.5
"""

from __future__ import annotations

from explorer.record.comparison import Comparison
from explorer.record.failure import Failure
from explorer.record.measurement import Measurement, Refused
from explorer.view.drawing.units import NOT_MEASURED, mib


def peak_in_words(run: Measurement) -> str:
    """The step's peak, or that it is at least what was held when the run ended: never more than is known."""
    if run.complete or run.held_peak_bytes is None:
        return mib(run.step_peak_bytes)
    return f"at least {mib(run.held_peak_bytes)}"


def peak_and_end(run: Measurement) -> str:
    """`56.2 MiB`; `at least 573.0 MiB, then refused`."""
    return peak_in_words(run) if run.failure is None else f"{peak_in_words(run)}, then {_ended(run.failure)}"


def what_failed(comparison: Comparison) -> str:
    """`candidate failed in the recompute of blocks.5`; the empty string: both runs went to their end."""
    for name, run in (("baseline", comparison.baseline), ("candidate", comparison.candidate)):
        if run.failure is not None:
            where = f" in {run.failed_in}" if run.failed_in else ""
            return f"{name} {_ended(run.failure)}{where}"
    return "failed when its gradients were taken" if comparison.failure is not None else ""


def who_failed(comparison: Comparison) -> str:
    """`candidate failed`: the same without the place, where there is little room."""
    return what_failed(comparison).partition(" in the ")[0].partition(" in ")[0]


def stored_peak(headlines: dict[str, object]) -> str:
    """The peak of a measurement from its stored headline figures."""
    peak, held = headlines.get("step_peak_bytes"), headlines.get("held_peak_bytes")
    if isinstance(peak, int):
        return mib(peak)
    return f"at least {mib(held)}, then failed" if isinstance(held, int) else NOT_MEASURED


def did_not_fit(run: Measurement, whole: Measurement | None) -> str:
    """What was refused before `run` fitted, and the baseline's peak as far as it is known; the empty string: nothing.

    `whole` is the baseline put together from `run`.
    """
    if not run.refused:
        return ""
    tried = [f"{one.what}{_at_least(one)}" for one in run.refused]
    refused = f"Did not fit: {', then '.join(tried)}, then refused."
    if whole is None or whole.step_peak_bytes is None:
        return refused
    needed = mib(whole.step_peak_bytes)
    return f"{refused} Put together from the run that fitted, everything kept needs {needed} (predicted)."


def _at_least(refused: Refused) -> str:
    return "" if refused.held_peak_bytes is None else f", at least {mib(refused.held_peak_bytes)}"


def _ended(failure: Failure) -> str:
    return "refused" if failure.kind == "out of memory" else "failed"
