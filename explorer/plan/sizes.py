"""Sizes as people write them and as they read them. Binary units only: `1.5GiB`, `800MiB` or `123456B`.

budget_text.py reads budgets, which have more forms.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from explorer.errors import BadInput

UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4}
_WRITTEN = ((1024**4, "TiB", 2), (1024**3, "GiB", 2), (1024**2, "MiB", 1), (1024, "KiB", 1), (1, "B", 0))
"""Units, their names, and digits behind the point."""
MOST_DIGITS = 4
"""Digits behind the point that may tell two sizes apart; sizes that need more are written in bytes."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes, rounded down. Raises BadInput; `MB` is refused because half of all readers take it for MiB."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in UNITS:
        unit = match[2].upper() if match is not None else ""
        hint = "Sizes are written as 1.5GiB, 800MiB, 64KiB or 123456B."
        if match is not None and unit in ("KB", "MB", "GB", "TB"):
            hint = f"Some count {unit} in thousands and others in 1,024s: write {match[1]}{unit[0]}iB."
        raise BadInput(f"{text!r} is not a size.", hint=hint)
    number, unit = match[1], UNITS[match[2].lower()]
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


@lru_cache(1 << 14)  # a chart writes the sizes of 1,400 events
def mib(n_bytes: int | float) -> str:
    """`206.1 MiB`; from 1,024 MiB on in GiB, below 1 MiB in KiB or bytes."""
    size = abs(n_bytes)
    sign = "\N{MINUS SIGN}" if n_bytes < 0 else ""
    if size == 0:
        return "0 MiB"
    unit, name, digits = _scale(size)
    return f"{sign}{size / unit:,.{digits}f} {name}"


def from_to(old: int | float, new: int | float, between: str = " to ") -> str:
    """`206.1 to 56.2 MiB`: two sizes in the unit of the larger, with digits that tell different sizes apart.

    A size below a thousandth of that unit keeps its own: `15.0 MiB to 96 B`. `between` stands between both.
    """
    unit, name, digits = _scale(max(old, new) or 1024**2)
    if 0 < min(old, new) < unit / 1000:
        return f"{mib(old)}{between}{mib(new)}"
    before, after = _number(old / unit, digits), _number(new / unit, digits)
    while old != new and float(before.replace(",", "")) == float(after.replace(",", "")):
        digits += 1
        if digits > MOST_DIGITS:
            return f"{old:,}{between}{new:,} B"
        before, after = (f"{size / unit:,.{digits}f}" for size in (old, new))
    return f"{before}{between}{after} {name}"


def _scale(size: int | float) -> tuple[int, str, int]:
    """Unit, its name and digits behind the point of the largest unit that is no larger than `size`."""
    return next((scale for scale in _WRITTEN if size >= scale[0]), _WRITTEN[-1])


def _number(value: float, digits: int) -> str:
    """`206.1`; a value below 1 has two digits that count, the last one unless it is zero: `0.46`, `0.5`."""
    if not 0 < value < 1:
        return f"{value:,.{digits}f}" if value else "0"
    return f"{value:.{max(digits, 1 - math.floor(math.log10(value)))}f}".removesuffix("0")


def distinct_texts(*sizes: int) -> tuple[str, ...]:
    """Each size as `mib` writes it; in bytes where two unequal sizes read the same."""
    texts = tuple(map(mib, sizes))
    return texts if len(set(texts)) == len(set(sizes)) else tuple(f"{size:,} B" for size in sizes)


def signed(change: float) -> str:
    """`+12 %`"""
    return f"{change:+.0%}".replace("%", " %").replace("-", "\N{MINUS SIGN}")


def mib_up(n_bytes: int) -> str:
    """The size rounded up: a budget of the printed size is never less than `n_bytes`."""
    unit, _, digits = _scale(n_bytes)
    step = unit / 10**digits
    return mib(math.ceil(n_bytes / step) * step)


def parse_share(text: str) -> float:
    """`+10%` or `60%` as a share; `+10 % time` too. Raises BadInput."""
    stripped = text.strip().removesuffix("time").strip()
    try:
        share = float(stripped.removesuffix("%")) / 100
    except ValueError:
        share = None
    if share is None or not stripped.endswith("%") or not 0 <= share < 1e6:
        raise BadInput(f"{text!r} is not a share.", hint="Shares are written as 60% or +10%.")
    return share
