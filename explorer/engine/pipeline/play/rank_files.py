"""Files of a rank in the folder of results: its report, and its gradients and buffers."""

from __future__ import annotations

from pathlib import Path


def report_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.msgpack"


def tensor_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pt"


def report_files(folder: Path) -> list[Path]:
    """Existing report files of all ranks."""
    return sorted(folder.glob("rank-*.msgpack"))
