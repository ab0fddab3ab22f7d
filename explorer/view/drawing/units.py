"""Numbers as people read them: value, unit, and `not measured` for missing values."""

from __future__ import annotations

import math

from explorer.plan import sizes
from explorer.record.measurement import Samples

NOT_MEASURED = "not measured"
MINUS = "\N{MINUS SIGN}"
MIB = 1024**2
MOST_DIGITS = 4
"""Behind the point: a tenth of a microsecond is less than any clock here can tell."""
_COUNT_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def mib(n_bytes: int | float | None) -> str:
    """A size as the plans write it, or `not measured`."""
    return NOT_MEASURED if n_bytes is None else sizes.mib(n_bytes)


def from_to(old: int | None, new: int | None, between: str = " to ") -> str:
    """`206.1 to 56.2 MiB` as the plans write it, or what is not measured."""
    if old is None or new is None:
        return f"{mib(old)}{between}{mib(new)}"
    return sizes.from_to(old, new, between)


def byte_axis(largest_bytes: int | float) -> tuple[int, str]:
    """Bytes of one axis unit and its name, for an axis that reaches `largest_bytes`."""
    if largest_bytes >= 4 * 1024**3:
        return 1024**3, "GiB"
    return (MIB, "MiB") if largest_bytes >= MIB / 2 else (1024, "KiB")


def flop_axis(largest: int | float) -> tuple[float, str]:
    """FLOPs of one axis unit and its name, for an axis that reaches `largest`."""
    unit, prefix = _count_unit(largest)
    return unit, f"{prefix}FLOP"


def flops(n: int | None) -> str:
    """`16.49 GFLOP`."""
    if n is None:
        return NOT_MEASURED
    unit, prefix = _count_unit(n)
    return f"{n / unit:,.2f} {prefix}FLOP" if prefix else f"{n:,} FLOP"


def count(n: int | None, what: str, several: str = "") -> str:
    """`1 tensor`, `54 tensors`; `several`: the plural if it is not `what` with an s."""
    if n is None:
        return NOT_MEASURED
    return f"{n:,} {what}" if n == 1 else f"{n:,} {several or what + 's'}"


def time_ratio(ratio: float, spread: float | None = None) -> str:
    """`×1.25 ± 0.02`. A spread below the last digit counts as one of this digit: no two runs take the same time."""
    return f"×{ratio:.2f}" + ("" if spread is None else f" ± {max(spread, 0.01):.2f}")


def milliseconds(samples: Samples | None) -> str:
    """`12.3 ± 0.4 ms`: median and half the distance between the quartiles, both to the first digit of the latter."""
    if samples is None or samples.median_ms is None:
        return NOT_MEASURED
    median, spread = samples.median_ms, samples.spread_ms
    if not spread:
        return f"{_three(median)} ms" if spread is None else f"{_three(median)} ± 0 ms"
    digits = min(max(0, -math.floor(math.log10(float(f"{spread:.0e}")))), MOST_DIGITS)
    return f"{median:,.{digits}f} ± {spread:,.{digits}f} ms"


def median_ms(ms: float) -> str:
    """`531 ms`, `1.23 ms`: a time without its spread."""
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2f} ms"


def percent(share: float | None, *, signed: bool = False) -> str:
    """0.217 as `21.7 %`, `+21.7 %` when signed; whole numbers from ten percent on when they are signed."""
    if share is None:
        return NOT_MEASURED
    value = 100 * share
    if signed and value and abs(value) < 0.05:
        return f"{_sign(value)}<0.1 %"
    digits = 0 if abs(value) >= 99.95 or (signed and abs(value) >= 10) else 1
    text = f"{abs(value):,.{digits}f} %"
    if signed:
        return f"{_sign(value)}{text}"
    return f"{MINUS if value < 0 else ''}{text}"


def percent_whole(share: float) -> str:
    """0.5 as `50 %`, for typed shares and for rough shares."""
    return f"{100 * share:.0f} %"


def change(old: int | float | None, new: int | float | None) -> float | None:
    """Relative change from `old` to `new`; None if a value is unknown or `old` is zero."""
    return None if not old or new is None else new / old - 1


def _sign(value: float) -> str:
    if value < 0:
        return MINUS
    return "+" if value > 0 else ""


def _count_unit(n: int | float) -> tuple[float, str]:
    return next((entry for entry in _COUNT_UNITS if abs(n) >= entry[0]), (1.0, ""))


def _three(value: float) -> str:
    """Three significant digits, never in powers of ten for everyday sizes."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
