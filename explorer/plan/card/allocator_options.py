"""Options of torch's caching allocator, as PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF) sets them.

Three options are played: `max_split_size_mb`, `roundup_power2_divisions` and `expandable_segments`. Other options are
named in `not_played`; of them, `garbage_collection_threshold` changes nothing without a limit on the process.
Source: c10/core/AllocatorConfig.cpp of torch. Where torch's notes on CUDA semantics say otherwise, the code counts.
"""

from __future__ import annotations

import re

from explorer.errors import BadInput
from explorer.record.base import Record

GRAIN = 512
MIB = 1 << 20
FIRST_DIVISION_LOG, N_DIVISIONS = 20, 16
"""Divisions of powers of two are given for requests from 1 MiB to 32 GiB."""
PLAYED = ("max_split_size_mb", "roundup_power2_divisions", "expandable_segments")
LEAST_SPLIT_MB = 20
OTHER_OPTIONS = ("expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:128")
"""Settings that people try when memory is refused; each is played beside the chosen one."""
OFFERED_OPTIONS = (*OTHER_OPTIONS, "max_split_size_mb:512", "garbage_collection_threshold:0.8")
COLLECTION = "garbage_collection_threshold"


class AllocatorOptions(Record):
    """The options that change what is reserved; the defaults are torch's."""

    max_split_bytes: int | None = None
    """None: blocks of any size are split."""
    expandable_segments: bool = False
    divisions: tuple[int, ...] = ()
    """How many sizes a power of two has, for requests of 1 MiB, 2 MiB, 4 MiB and so on; empty: multiples of 512."""
    played: tuple[str, ...] = ()
    """The options of the line that are played, as `name:value`."""
    not_played: tuple[str, ...] = ()
    """The options of the line that have no rule here, as `name:value`."""

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
    for item in split_options(text):
        name, colon, value = item.partition(":")
        if not colon:
            faults.append(f"{name!r} has no value")
        values[name] = value
    largest = _number(values.get("max_split_size_mb"), "max_split_size_mb", faults)
    if largest is not None and largest < LEAST_SPLIT_MB:
        faults.append(f"max_split_size_mb is {largest}, and has to be {LEAST_SPLIT_MB} or more")
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
        played=tuple(f"{name}:{value}" for name, value in values.items() if name in PLAYED),
        not_played=tuple(f"{name}:{value}" for name, value in values.items() if name not in PLAYED),
    )


def split_options(text: str) -> list[str]:
    """The options of a line one by one; a list in brackets is part of its option."""
    items = re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text)
    return [option for item in items if (option := item.replace(" ", ""))]


def _number(value: str | None, name: str, faults: list[str]) -> int | None:
    if value is None:
        return None
    if not value.isdecimal() or len(value) > 9:
        faults.append(f"{name} is {value[:40]!r}, and has to be a whole number")
        return None
    return int(value)


def _divisions(value: str, faults: list[str]) -> tuple[int, ...]:
    """`4` for all sizes, or `[256:1,512:2,>:8]`: divisions of sizes from 256 MiB, from 512 MiB, and from there on.

    As in torch's code, sizes below the first have its divisions, and sizes between two that are named have none. `>`
    begins with the last size before it.
    """
    if not value:
        return ()
    pairs = [item.partition(":")[::2] for item in value.strip("[]").split(",")] if value[0] == "[" else [(">", value)]
    divisions = [0] * N_DIVISIONS
    last = 0
    for number, (size, text) in enumerate(pairs):
        if not (text.isdecimal() and len(text) < 10) or int(text) & (int(text) - 1):
            faults.append(f"roundup_power2_divisions has {text[:40]!r}, and takes powers of two, or 0 for none")
            return ()
        if size == ">":
            divisions[last:] = [int(text)] * (N_DIVISIONS - last)
            continue
        if not (size.isdecimal() and len(size) < 10) or int(size) & (int(size) - 1) or not int(size):
            faults.append(f"roundup_power2_divisions has the size {size[:40]!r}, and takes powers of two in MiB")
            return ()
        last = min(int(size).bit_length() - 1, N_DIVISIONS - 1)
        first = last if number else 0
        divisions[first : last + 1] = [int(text)] * (last + 1 - first)
    return tuple(divisions)
