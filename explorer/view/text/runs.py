"""Figures and conditions of a run in words, also of a run cut short.

at least 573.0 MiB, then refused        failed in the recompute of blocks.5
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from explorer.plan.card.cards import DRIVER_BYTES
from explorer.plan.card.history import DeviceHistory, SimulatedHistory
from explorer.record.card import CardMemory, RefusedRequest
from explorer.record.comparison import Comparison
from explorer.record.failure import Failure
from explorer.record.measurement import Measurement, Refused
from explorer.record.run import RunSpec
from explorer.view.drawing.units import NOT_MEASURED, count, flops, mib, milliseconds, percent


def figures_of(run: Measurement) -> dict[str, str]:
    """Each figure of a run under its name on the page, with its unit."""
    return {
        "Step peak": peak_and_end(run),
        "Phase of the peak": str(run.peak_phase or NOT_MEASURED),
        "Saved after forward": mib(run.saved_after_forward_bytes),
        "Forward": flops(run.forward_flops),
        "Recompute": flops(run.recompute_flops),
        "Backward": flops(run.backward_flops),
        "Step time": milliseconds(run.times.step if run.times and run.complete else None),
    }


def stored_flops(headlines: Mapping[str, Any]) -> str:
    """`+33 %` against the baseline, or the FLOPs of a run by itself; the empty string: neither is known."""
    if (ratio := headlines.get("flop_ratio")) is not None:
        return percent(ratio - 1, signed=True)
    parts = [headlines.get(f"{phase}_flops") for phase in ("forward", "recompute", "backward")]
    numbers = [part for part in parts if part is not None]
    return flops(sum(numbers)) if numbers else ""


def stored_time(headlines: Mapping[str, Any]) -> str:
    """`×1.25 ± 0.02` against the baseline, or the time of a step; the empty string: neither is known."""
    if (ratio := headlines.get("time_ratio")) is not None:
        return f"×{ratio:.2f} ± {headlines.get('time_ratio_spread') or 0:.2f}"
    if (ms := headlines.get("step_ms")) is not None:
        return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2f} ms"
    return ""


def peak_in_words(run: Measurement) -> str:
    """The step's peak; for a run cut short, `at least` the bytes held at its end."""
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
    """`candidate failed`: `what_failed` without the place, for narrow cells."""
    return what_failed(comparison).partition(" in the ")[0].partition(" in ")[0]


def stored_peak(headlines: dict[str, object]) -> str:
    """The peak of a measurement from its stored headline figures."""
    peak, least = headlines.get("step_peak_bytes"), headlines.get("held_peak_bytes")
    if isinstance(peak, int):
        return mib(peak)
    return f"at least {mib(least)}, then failed" if isinstance(least, int) else NOT_MEASURED


def did_not_fit(run: Measurement, whole: Measurement | None) -> str:
    """Words for the runs refused before `run` fitted, and for the baseline's peak if known; else the empty string.

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


def conditions(spec: RunSpec) -> str:
    """`small, batch=4, cpu, bfloat16 autocast`: size, arguments, device, and options that differ from the default."""
    model, usual = spec.model, RunSpec(model=spec.model)
    named = [model.size or "", *(f"{name}={value}" for name, value in sorted(model.arguments.items()))]
    named += [f"weights {Path(model.weights).name}" if model.weights else "", spec.device]
    named += ["" if spec.dtype == usual.dtype else spec.dtype]
    named += ["" if spec.autocast == usual.autocast else f"{spec.autocast} autocast"]
    named += ["" if spec.mode == usual.mode else f"{spec.mode} mode", "forward alone" if spec.forward_only else ""]
    named += ["" if spec.optimizer == usual.optimizer else f"optimizer {spec.optimizer}"]
    named += [f"momentum {spec.momentum:g}" if spec.optimizer == "sgd" and spec.momentum else ""]
    named += ["" if spec.n_accumulation == 1 else f"{spec.n_accumulation} microbatches"]
    named += [f"frozen {', '.join(spec.frozen)}" if spec.frozen else ""]
    named += ["" if spec.n_threads == usual.n_threads else count(spec.n_threads, "thread")]
    return ", ".join(filter(None, named))


def peaks_in_words(run: Measurement) -> str:
    """The allocator's peaks, shown beside the drawn peak; empty if the allocator reports no peaks."""
    own = run.peaks
    named = {
        "requested": own.requested_peak_bytes, "allocated": own.allocated_peak_bytes,
        "reserved": own.reserved_peak_bytes, "of it stranded": own.stranded_bytes,
        "reserved once the cache is warm": own.steady_reserved_peak_bytes,
        "offloaded to the host": own.offloaded_peak_bytes or None,
    }  # fmt: skip
    peaks = ", ".join(f"{mib(n_bytes)} {name}" for name, n_bytes in named.items() if n_bytes is not None)
    return f"allocator's peaks: {peaks}" if peaks else ""


def card_rows(memory: CardMemory) -> dict[str, str]:
    """What a card holds, figure by figure, and what is not known of it."""
    card = memory.card
    left, size = memory.headroom_bytes, mib(card.total_bytes)
    driver = (
        f"{mib(card.taken_bytes)} of driver and context"
        if card.taken_bytes is not None
        else f"driver and context are assumed to take {mib(DRIVER_BYTES[0])} to {mib(DRIVER_BYTES[1])}"
    )
    rows = {
        "Requested": f"{mib(memory.requested_bytes)}, {mib(memory.workspace_bytes)} of it for workspaces of cuBLAS",
        "Allocated": mib(memory.allocated_bytes),
        "Reserved": f"{mib(memory.reserved_bytes)}, {mib(memory.stranded_bytes)} of it stranded",
        "Card": f"{card.name if size in card.name else f'{card.name}, {size}'}; {driver}",
    }
    if memory.refused is not None:
        rows["Refused"] = refusal_sentence(memory.refused)
    elif left is not None:
        rows["Left"] = mib(left)
    else:
        least = card.total_bytes - memory.reserved_bytes
        rows["Left"] = f"{mib(least - DRIVER_BYTES[1])} to {mib(least - DRIVER_BYTES[0])}"
    if memory.unknown:
        rows["Not known"] = "; ".join(part.what for part in memory.unknown)
    if memory.not_checked:
        rows["Not checked"] = f"{', '.join(memory.not_checked)}: by torch's rules, against no recorded history"
    if memory.not_played:
        rows["Not played"] = f"{', '.join(memory.not_played)}: the figures are those without it"
    return rows


def refusal_sentence(refused: RefusedRequest) -> str:
    """`2.00 GiB in blocks.27, div, forward of step 1: 176.07 GiB allocated, 1.50 GiB reserved and free`."""
    where = ", ".join(filter(None, (refused.block, refused.op.removeprefix("aten.").partition(".")[0])))
    return (
        f"{mib(refused.n_bytes)} in {where}, {refused.phase} of step {refused.step}: "
        f"{mib(refused.allocated_bytes)} allocated, {mib(refused.free_bytes)} reserved and free"
    )


def history_rows(history: DeviceHistory) -> list[dict[str, str]]:
    """The peaks of a recorded history, then those of its requests under each of the simulated options."""
    rows = [_history_row("as recorded", history, str(len(history.refused)))]
    for simulated in history.simulated:
        n_refused = "" if simulated.n_refused is None else str(simulated.n_refused)
        rows.append(_history_row(simulated.options or "the same options, simulated", simulated, n_refused))
    return rows


def _history_row(options: str, peaks: DeviceHistory | SimulatedHistory, refused: str) -> dict[str, str]:
    return {
        "options": options,
        "requested": mib(peaks.requested_bytes) if isinstance(peaks, DeviceHistory) else "",
        "allocated": mib(peaks.allocated_bytes),
        "reserved": mib(peaks.reserved_bytes),
        "stranded": mib(peaks.stranded_bytes),
        "refused": refused,
    }


def refusal_rows(history: DeviceHistory) -> list[dict[str, str]]:
    """Each request that the recorded card refused."""
    return [
        {
            "refused at event": str(refused.event),
            "request": mib(refused.n_bytes),
            "allocated": mib(refused.allocated_bytes),
            "reserved": mib(refused.reserved_bytes),
            "free on the card": mib(refused.driver_free_bytes),
        }
        for refused in history.refused
    ]
