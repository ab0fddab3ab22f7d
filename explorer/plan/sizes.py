"""Sizes as people write them: `1.5GiB`, `800MiB`, `123456B`, `123456`. Binary units only."""

from __future__ import annotations

import re

from explorer.errors import BadInput

_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes, rounded down. Raises BadInput; `MB` is refused because half of all readers take it for MiB."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise BadInput(f"{text!r} is not a size.", hint="Sizes are written as 1.5GiB, 800MiB, 64KiB or 123456B.")
    number, unit = match[1], _UNITS[match[2].lower()]
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def mib(n_bytes: int) -> str:
    """`206.1 MiB`."""
    return f"{n_bytes / 1024**2:,.1f} MiB"
