"""Memory that a process can still take. A run that asks for more must fail before the machine does."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current", "memory.stat"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),  # version 1
)


def available_bytes() -> int | None:
    """Memory available without swapping: the lower of the machine's and the container's; None if neither is known."""
    limits = [n_bytes for n_bytes in (_of_machine(), _of_container()) if n_bytes is not None]
    return min(limits, default=None)


def _of_machine() -> int | None:
    kilobytes = _table(MEMINFO).get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _of_container() -> int | None:
    """Free bytes under the container's limit. File caches that the kernel may drop count as free."""
    for limit_name, used_name, table_name in _FILES:
        limit, used = _number(CGROUP / limit_name), _number(CGROUP / used_name)
        if limit is not None and used is not None:
            return max(0, limit - used + _table(CGROUP / table_name).get("inactive_file", 0))
    return None


def _number(path: Path) -> int | None:
    """The number in a file; None if the file is missing or holds a word such as `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path) -> dict[str, int]:
    """The first number of every line by the line's first word."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
