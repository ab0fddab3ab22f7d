"""Figures and conditions of a run in words, also of a run cut short.

at least 573.0 MiB, then refused        failed in the recompute of blocks.5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from explorer.plan.card.allocator_options import COLLECTION
from explorer.plan.card.cards import DRIVER_BYTES
from explorer.plan.card.torch_rules import torch_of
from explorer.plan.memory.ledger import alive, peak_tick
from explorer.plan.memory.outside import saved_beside
from explorer.plan.sizes import from_to
from explorer.record.card import Card, CardMemory, OtherSetting, RefusedRequest, UnknownMemory
from explorer.record.comparison import Comparison
from explorer.record.failure import Failure
from explorer.record.history import DeviceHistory, SimulatedHistory
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec
from explorer.view.drawing.rows import Row, row_sum
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
        "Step time": milliseconds(run.step_times),
    }


def stored_flops(headlines: Mapping[str, Any]) -> str:
    """`+33 %` against the baseline, or the FLOPs of a run by itself; the empty string: neither is known."""
    if (ratio := headlines.get("flop_ratio")) is not None:
        return percent(ratio - 1, signed=True)
    parts = [headlines.get(f"{phase}_flops") for phase in ("forward", "recompute", "backward")]
    numbers = [part for part in parts if part is not None]
    return flops(sum(numbers)) if numbers else ""


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


def did_not_fit(run: Measurement, whole: Measurement | None) -> str:
    """Words for the runs refused before `run` fitted, and for the baseline's peak if known; else the empty string.

    `whole` is the baseline put together from `run`.
    """
    if not run.refused:
        return ""
    tried = []
    for refused in run.refused:
        tried.append(refused.what)
        if refused.held_peak_bytes is not None:
            tried[-1] += f", at least {mib(refused.held_peak_bytes)}"
    sentence = f"Did not fit: {', then '.join(tried)}, then refused."
    if whole is None or whole.step_peak_bytes is None:
        return sentence
    needed = mib(whole.step_peak_bytes)
    return f"{sentence} Put together from the run that fitted, everything kept needs {needed} (predicted)."


def _ended(failure: Failure) -> str:
    return "refused" if failure.kind == "out of memory" else "failed"


def conditions(spec: RunSpec) -> str:
    """`small, batch=4, cpu, bfloat16 autocast`: size, arguments, device, and options that differ from the default."""
    model, usual = spec.model, RunSpec(model=spec.model)
    options = {
        "dtype": spec.dtype,
        "autocast": f"{spec.autocast} autocast",
        "mode": f"{spec.mode} mode",
        "forward_only": "forward alone",
        "optimizer": f"optimizer {spec.optimizer}",
        "optimizer_form": f"{spec.optimizer_form} optimizer",
        "momentum": f"momentum {spec.momentum:g}" * (spec.optimizer == "sgd"),
        "n_accumulation": f"{spec.n_accumulation} microbatches",
        "frozen": f"frozen {', '.join(spec.frozen)}",
        "n_threads": count(spec.n_threads, "thread"),
    }
    named = [model.size, *(f"{name}={value}" for name, value in sorted(model.arguments.items()))]
    if model.weights:
        named.append(f"weights {Path(model.weights).name}")
    named.append(spec.device)
    named += [text for name, text in options.items() if getattr(spec, name) != getattr(usual, name)]
    return ", ".join(filter(None, named))


def peaks_in_words(run: Measurement) -> str:
    """The allocator's peaks, shown beside the drawn peak; empty if the allocator reports no peaks."""
    peaks = run.peaks
    named = {
        "requested": peaks.requested_peak_bytes, "allocated": peaks.allocated_peak_bytes,
        "reserved": peaks.reserved_peak_bytes, "of it stranded": peaks.stranded_bytes,
        "reserved once the cache is warm": peaks.steady_reserved_peak_bytes,
        "offloaded to the host": peaks.offloaded_peak_bytes or None,
    }  # fmt: skip
    words = ", ".join(f"{mib(n_bytes)} {name}" for name, n_bytes in named.items() if n_bytes is not None)
    return words and f"allocator's peaks: {words}"


def card_rows(memory: CardMemory) -> dict[str, str]:
    """What a card holds, figure by figure, and what is not known of it."""
    card = memory.card
    driver = f"driver and context are assumed to take {mib(DRIVER_BYTES[0])} to {mib(DRIVER_BYTES[1])}"
    if card.driver_bytes is not None:
        driver = f"{mib(card.driver_bytes)} of driver and context"
    rows = {
        "Requested": f"{mib(memory.requested_bytes)}, {mib(memory.workspace_bytes)} of it for workspaces of cuBLAS",
        "Allocated": over_steps(memory, memory.least_allocated_bytes, memory.allocated_bytes),
        "Reserved": f"{over_steps(memory, memory.least_reserved_bytes, memory.reserved_bytes)}, "
        f"{mib(memory.stranded_bytes)} of it stranded",
        "Card": f"{card_name(card)}; torch {torch_of(card)}; {driver}",
    }
    if memory.refused is None:
        rows["Left"] = headroom_text(memory)
    return rows | card_notes(memory)


def over_steps(memory: CardMemory, least: int | None, most: int) -> str:
    """`3,104.5 MiB`, or `3,083.1 to 3,104.5 MiB over 12 steps` where steps differ."""
    return mib(most) if least in (None, most) else f"{mib(least)} to {mib(most)} over {memory.n_steps} steps"


def card_name(card: Card) -> str:
    """`B200, 178.35 GiB`."""
    size = mib(card.total_bytes)
    return card.name if size in card.name else f"{card.name}, {size}"


def headroom_text(memory: CardMemory) -> str:
    """What the card has left, an interval where the driver's share is assumed."""
    if memory.headroom_bytes is not None:
        return mib(memory.headroom_bytes)
    most, least = (memory.card.total_bytes - memory.reserved_bytes - share for share in DRIVER_BYTES)
    return f"{mib(least)} to {mib(most)}"


COLLECTS = "torch collects cached blocks only in a process with a memory fraction"


def card_notes(memory: CardMemory) -> dict[str, str]:
    """The refused request, what the figures leave out, and other settings of the allocator."""
    notes = {}
    if memory.refused is not None:
        notes["Refused"] = refusal_sentence(memory.refused)
    if memory.unknown:
        notes["Not known"] = "; ".join(map(unknown_text, memory.unknown))
    if memory.not_checked:
        notes["Not checked"] = f"{', '.join(memory.not_checked)}: by torch's rules, against no recorded history"
    if memory.not_played:
        collects = f"; {COLLECTS}" if COLLECTION in "".join(memory.not_played) else ""
        notes["Not played"] = f"{', '.join(memory.not_played)}: the figures are those without it{collects}"
    if memory.other_settings:
        notes["Other settings"] = settings_text(memory)
    return notes


def notes_of_cards(memories: Mapping[str, CardMemory]) -> list[tuple[str, str]]:
    """Titles and texts: the refused request of each run by name, and all other notes of the last run."""
    last = list(memories)[-1]
    notes = []
    for name, memory in memories.items():
        for title, note in card_notes(memory).items():
            if title == "Refused" and len(memories) > 1:
                note += f" ({name})"
            if title == "Refused" or name == last:
                notes.append((title, note))
    return notes


def counted_text(memory: CardMemory, allocated_bytes: int, reserved_bytes: int) -> str:
    """What torch's own code counted on an imaginary card beside what is predicted, to the byte."""
    predicted = f"predicted: {memory.allocated_bytes:,} and {memory.reserved_bytes:,}"
    return (
        f"Counted by torch's own CUDA code on an imaginary {memory.card.name}: {allocated_bytes:,} bytes allocated and "
        f"{reserved_bytes:,} reserved ({predicted})."
    )


def unknown_text(part: UnknownMemory) -> str:
    """`workspaces of cuDNN for convolutions (convolution): 0 MiB to what the card has left; the peak stays`."""
    if not part.ops:
        return part.what
    most = "what the card has left" if part.most_bytes is None else mib(part.most_bytes)
    if part.room_bytes is None:
        room = ""
    elif part.most_bytes is not None and part.most_bytes <= part.room_bytes:
        room = "; the peak stays"
    elif part.room_bytes:
        room = f"; the peak grows beyond {mib(part.room_bytes)} of it"
    else:
        room = "; the peak grows with it"
    return f"{part.what} ({', '.join(part.ops)}): {mib(part.least_bytes)} to {most}{room}"


def settings_text(memory: CardMemory) -> str:
    """`12.0 MiB less reserved with expandable_segments:True`, or whether a refused step would fit."""
    by_outcome: dict[str, list[str]] = {}
    for setting in memory.other_settings:
        by_outcome.setdefault(_outcome(memory, setting), []).append(setting.options)
    return "; ".join(f"{outcome} with {', '.join(options)}" for outcome, options in by_outcome.items())


def _outcome(memory: CardMemory, setting: OtherSetting) -> str:
    if setting.refused:
        return "refused too" if memory.refused else "refused"
    if memory.refused is not None:
        return f"fits, {mib(setting.reserved_bytes)} reserved,"
    saved = memory.reserved_bytes - setting.reserved_bytes
    if not saved:
        return "as much reserved"
    return f"{mib(abs(saved))} {'less' if saved > 0 else 'more'} reserved"


def refusal_sentence(refused: RefusedRequest) -> str:
    """`2.00 GiB in blocks.27, div, forward of step 1: 176.07 GiB allocated, 1.50 GiB reserved and free`."""
    return (
        f"{mib(refused.n_bytes)} in {operator_place(refused)}, {refused.phase} of step {refused.step}: "
        f"{mib(refused.allocated_bytes)} allocated, {mib(refused.free_bytes)} reserved and free"
    )


def operator_place(refused: RefusedRequest) -> str:
    """`blocks.27, div`: block and operator of a refused request."""
    op = refused.op.removeprefix("aten.").partition(".")[0]
    return ", ".join(filter(None, (refused.block, op))) or "the model itself"


def history_rows(history: DeviceHistory) -> list[dict[str, str]]:
    """The peaks of a recorded history, then those of its requests under each of the simulated options."""
    n_refused = None if history.reserved_bytes is None else len(history.refused)
    rows = [_history_row("as recorded", history, n_refused)]
    for simulated in history.simulated:
        rows.append(_history_row(simulated.options or "the same options, simulated", simulated, simulated.n_refused))
    return rows


def _history_row(options: str, peaks: DeviceHistory | SimulatedHistory, n_refused: int | None) -> dict[str, str]:
    return {
        "options": options,
        "requested": mib(peaks.requested_bytes) if isinstance(peaks, DeviceHistory) else "",
        "allocated": mib(peaks.allocated_bytes),
        "reserved": mib(peaks.reserved_bytes),
        "stranded": mib(peaks.stranded_bytes),
        "refused": "" if n_refused is None else str(n_refused),
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


def history_notes(history: DeviceHistory) -> list[str]:
    """What the figures of a recorded history do not hold."""
    notes = []
    if history.simulated:
        reserved = ""
        if history.first_reserved_bytes is not None:
            reserved = f"{mib(history.first_reserved_bytes)} were reserved "
        notes.append(
            f"{reserved}before the first event. Simulated rows begin with the blocks of that moment alone, without the "
            "cache around them."
        )
    if history.name:
        notes.append(
            "The trace of a profiler has the sizes of blocks, not of requests, and no streams."
            if history.simulated
            else "The CPU has no caching allocator: nothing is reserved, and no settings can be tried."
        )
    return notes


MOST_ROWS = 15
NO_FRAMES = {"module": "in no module", "source line": "no frames recorded"}


def alive_rows(run: Measurement, by: Literal["module", "source line"]) -> list[dict[str, str]]:
    """What is alive at the peak of a recorded history, the largest first; the smallest rows are one."""
    log = run.allocations
    if log is None:
        return []
    names, column = (log.blocks, log.block) if by == "module" else (log.ops, log.op)
    n_bytes, n_blocks = Counter[str](), Counter[str]()
    for entry in alive(log, peak_tick(log)).tolist():
        name = names[column[entry]] or ("before the recording" if not log.born[entry] else NO_FRAMES[by])
        n_bytes[name] += log.n_bytes[entry]
        n_blocks[name] += 1
    rows = n_bytes.most_common()
    if rest := rows[MOST_ROWS:]:
        others = count(len(rest), "other")
        n_blocks[others] = sum(n_blocks[name] for name, _ in rest)
        rows[MOST_ROWS:] = [(others, sum(size for _, size in rest))]
    whole = max(1, run.held_peak_bytes or 0)
    return [
        {by: name, "at the peak": mib(size), "share": percent(size / whole), "blocks": f"{n_blocks[name]:,}"}
        for name, size in rows
    ]


def _old_and_new(old: int, new: int) -> str:
    return mib(new) if old == new else from_to(old, new, " → ")


def rows_outside(shown: Sequence[Row], run: Measurement, baseline: Measurement | None) -> list[dict[str, str]]:
    """What is in none of the `shown` rows: saved bytes by line, and the forward FLOPs of all these lines together."""
    blocks = {fqn for row in shown for fqn in row.fqns}
    after, before = saved_beside(run, blocks), saved_beside(baseline or run, blocks)
    rows: list[dict[str, str]] = []
    for place in dict.fromkeys((*before, *after)):
        old, new = before.get(place, 0), after.get(place, 0)
        rows.append({"block": place, "saved after forward": _old_and_new(old, new)})
    whole = run.by_fqn[""].forward_flops if "" in run.by_fqn else 0
    if rest := whole - sum(row_sum(run, row, "forward_flops") for row in shown):
        rows.append({"block": "code in no block", "forward": flops(rest)})
    return rows


def row_cells(row: Row, run: Measurement, baseline: Measurement | None) -> dict[str, str]:
    """The cells of a block in the table of blocks."""
    again, flops_again = row_sum(run, row, "n_recompute"), row_sum(run, row, "recompute_flops")
    saved = row_sum(run, row, "saved_after_forward_bytes")
    before = row_sum(baseline or run, row, "saved_after_forward_bytes")
    times = recompute = ""
    if again or flops_again:
        times, recompute = "inside", flops(flops_again)
    if again:
        times = f"×{again}"
    return {
        "saved after forward": _old_and_new(before, saved),
        "forward": flops(row_sum(run, row, "forward_flops")),
        "recompute": recompute,
        "runs again": times,
    }
