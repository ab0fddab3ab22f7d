"""Sizes as people write them, `1.5GiB`, `800MiB`, `123456B`, and as they read them. Binary units only."""

from __future__ import annotations

import math
import re

from explorer.errors import BadInput

_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4}
_WRITTEN = ((1024**4, "TiB"), (1024**3, "GiB"))
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes, rounded down. Raises BadInput; `MB` is refused because half of all readers take it for MiB."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        unit = match[2].upper() if match is not None else ""
        hint = "Sizes are written as 1.5GiB, 800MiB, 64KiB or 123456B."
        if match is not None and unit in ("KB", "MB", "GB", "TB"):
            hint = f"Some count {unit} in thousands and others in 1,024s: write {match[1]}{unit[0]}iB."
        raise BadInput(f"{text!r} is not a size.", hint=hint)
    number, unit = match[1], _UNITS[match[2].lower()]
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def mib(n_bytes: int | float) -> str:
    """`206.1 MiB`; from 1,024 MiB on in GiB, below 0.1 MiB in KiB or bytes."""
    size = abs(n_bytes)
    sign = "\N{MINUS SIGN}" if n_bytes < 0 else ""
    if size == 0:
        return "0 MiB"
    for unit, name in _WRITTEN:
        if size >= unit:
            return f"{sign}{size / unit:,.2f} {name}"
    if size >= 1024**2 / 10:
        return f"{sign}{size / 1024**2:,.1f} MiB"
    return f"{sign}{size / 1024:,.1f} KiB" if size >= 1024 else f"{sign}{size:,.0f} B"


def distinct_texts(*sizes: int) -> tuple[str, ...]:
    """Each size as `mib` writes it; in bytes where two unequal sizes read the same."""
    texts = tuple(map(mib, sizes))
    return texts if len(set(texts)) == len(set(sizes)) else tuple(f"{size:,} B" for size in sizes)


def mib_up(n_bytes: int) -> str:
    """The size rounded up: a budget of the printed size is never less than `n_bytes`."""
    unit = next((unit for unit, _ in _WRITTEN if n_bytes >= unit), None)
    step = unit / 100 if unit else 1024**2 / 10 if n_bytes >= 1024**2 / 10 else 1024 / 10 if n_bytes >= 1024 else 1
    return mib(math.ceil(n_bytes / step) * step)
