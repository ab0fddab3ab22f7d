"""Runs made up of others: cut short, or of a caching allocator."""

from __future__ import annotations

import msgspec

from explorer.record import AllocatorPeaks, Measurement
from explorer.record.base import column
from tests.view.builders import MIB


def cut(run: Measurement, stop: int) -> Measurement:
    """What is left of `run` when it ended at tick `stop`."""
    log = run.allocations
    n = sum(born <= stop for born in log.born)
    names = ("n_bytes", "born", "role", "block", "op")
    return msgspec.structs.replace(
        run,
        phases=tuple(
            msgspec.structs.replace(span, end_tick=min(span.end_tick, stop + 1))
            for span in run.phases
            if span.first_tick <= stop
        ),
        allocations=msgspec.structs.replace(
            log,
            n_ticks=stop,
            time_ns=log.time_ns[: stop + 1],
            died=column(min(died, stop + 1) for died in log.died[:n]),
            **{name: getattr(log, name)[:n] for name in names},
        ),
    )


def on_cuda(run: Measurement) -> Measurement:
    """A made-up run of a caching allocator: blocks of 512 bytes and more, segments of twice that."""
    held = run.allocations.held_bytes
    allocated, reserved = column(size + 512 for size in held), column(2 * max(held) for _ in held)
    peaks = AllocatorPeaks(
        requested_peak_bytes=max(held),
        allocated_peak_bytes=max(held) + MIB,
        reserved_peak_bytes=max(reserved),
        allocated=allocated,
        reserved=reserved,
    )
    return msgspec.structs.replace(run, peaks=peaks)
