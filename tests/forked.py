"""Which processes the fork server of this very process has forked and not yet buried."""

from __future__ import annotations

import os
from pathlib import Path


def forked() -> set[int]:
    parent_of: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent_of[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return {
        process
        for process, parent in parent_of.items()
        if parent_of.get(parent) == os.getpid() and is_fork_server(parent) and is_fork_server(process)
    }


def server_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def is_fork_server(process: int) -> bool:
    try:
        return b"explorer.child_process.fork_server" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
