"""Options of torch's caching allocator, as PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF) sets them.

Four options change what is reserved and are played: `max_split_size_mb`, `roundup_power2_divisions`,
`expandable_segments`, `garbage_collection_threshold` (read, never at work without a limit on the process). Other
options are named in `not_played`.
Source: "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF" in torch's notes on CUDA semantics.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from explorer.errors import BadInput

GRAIN = 512
MIB = 1 << 20
FIRST_DIVISION_LOG, N_DIVISIONS = 20, 16
"""Divisions of powers of two are given for requests from 1 MiB to 32 GiB."""
KNOWN = ("max_split_size_mb", "roundup_power2_divisions", "expandable_segments", "garbage_collection_threshold")


@dataclass(frozen=True, kw_only=True)
class AllocatorOptions:
    """The options that change what is reserved; the defaults are torch's."""

    max_split_bytes: int | None = None
    """None: blocks of any size are split."""
    expandable_segments: bool = False
    divisions: tuple[int, ...] = ()
    """How many sizes a power of two has, for requests of 1 MiB, 2 MiB, 4 MiB and so on; empty: multiples of 512."""
    not_played: tuple[str, ...] = ()
    """Names of the options that were given and change nothing here."""

    def rounded(self, n_bytes: int) -> int:
        """Bytes of the block that a request needs."""
        if self.divisions and n_bytes > GRAIN:
            index = min(max(n_bytes.bit_length() - 1 - FIRST_DIVISION_LOG, 0), N_DIVISIONS - 1)
            divisions = self.divisions[index]
            if divisions > 1 and n_bytes > GRAIN * divisions:
                step = (1 << (n_bytes.bit_length() - 1)) // divisions
                return -(-n_bytes // step) * step
        return max(GRAIN, -(-n_bytes // GRAIN) * GRAIN)

    def is_split(self, size: int, rest: int, *, is_small: bool) -> bool:
        """Whether the rest of a block becomes a block of its own (rules 4, 8 of `caching_allocator.py`)."""
        if is_small or self.expandable_segments:
            return rest >= GRAIN
        return rest > MIB and (self.max_split_bytes is None or size < self.max_split_bytes)

    def address_range_bytes(self, capacity_bytes: int | None, size: int) -> int:
        """Addresses that an expandable segment reserves: the card's memory and an eighth more."""
        whole = max(capacity_bytes or 1 << 40, size)
        return -(-(whole + whole // 8) // (20 * MIB)) * 20 * MIB


def parse_options(text: str) -> AllocatorOptions:
    """Options of a line such as `expandable_segments:True,max_split_size_mb:128`; empty: the defaults.

    Raises BadInput with every fault of the line.
    """
    values: dict[str, str] = {}
    faults = []
    for item in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text):
        name, colon, value = item.strip().partition(":")
        if not name:
            continue
        if not colon:
            faults.append(f"{name!r} has no value")
        values[name] = value.strip()
    largest = _number(values.get("max_split_size_mb"), "max_split_size_mb", faults)
    if largest is not None and largest <= 20:
        faults.append(f"max_split_size_mb is {largest}, and has to be above 20")
    divisions = _divisions(values.get("roundup_power2_divisions", ""), faults)
    flag = values.get("expandable_segments", "False")
    if flag not in ("True", "False"):
        faults.append(f"expandable_segments is {flag!r}, and has to be True or False")
    if faults:
        raise BadInput(
            f"The allocator's options {text[:200]!r} cannot be read: {'; '.join(faults)}.",
            hint="Write them as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True,max_split_size_mb:128.",
        )
    return AllocatorOptions(
        max_split_bytes=None if largest is None else largest * MIB,
        expandable_segments=flag == "True",
        divisions=divisions,
        not_played=tuple(sorted(set(values) - set(KNOWN) | set(values) & {"garbage_collection_threshold"})),
    )


def _number(value: str | None, name: str, faults: list[str]) -> int | None:
    if value is None:
        return None
    if not value.isdecimal() or len(value) > 9:
        faults.append(f"{name} is {value[:40]!r}, and has to be a whole number")
        return None
    return int(value)


def _divisions(value: str, faults: list[str]) -> tuple[int, ...]:
    """`4`, or `[256:1,512:2,>:8]`: divisions of the sizes up to so many MiB, and of all above."""
    if not value:
        return ()
    pairs = (
        [("1", value), (">", value)]
        if not value.startswith("[")
        else [
            (size.strip(), n.strip()) for size, _, n in (item.partition(":") for item in value.strip("[]").split(","))
        ]
    )
    divisions = [1] * N_DIVISIONS
    last = 0
    for size, n in pairs:
        if not n.isdecimal() or not 1 <= int(n) <= 64 or int(n) & (int(n) - 1):
            faults.append(f"roundup_power2_divisions has {n[:40]!r}, and takes powers of two up to 64")
            return ()
        if size != ">" and (not size.isdecimal() or int(size) & (int(size) - 1) or not int(size)):
            faults.append(f"roundup_power2_divisions has the size {size[:40]!r}, and takes powers of two in MiB")
            return ()
        index = N_DIVISIONS if size == ">" else min(int(size).bit_length() - 1, N_DIVISIONS - 1)
        if size == ">":
            divisions[last:] = [int(n)] * (N_DIVISIONS - last)
        else:
            divisions[last : index + 1] = [int(n)] * (index + 1 - last)
            last = index + 1
    return tuple(divisions)
