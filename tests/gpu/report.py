"""The report: what ran where, one row a check, every figure, and the words of what went wrong."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from explorer.engine.device.device import device_of
from tests.gpu.kit import Figure, Result


def write_report(out: Path, results: Sequence[Result]) -> None:
    """`report.md`, and a file of words for each check that did not pass."""
    (out / "report.md").write_text(report(results))
    for result in results:
        if result.outcome in ("failed", "crashed"):
            (out / f"{re.sub('[^A-Za-z0-9_.]+', '_', result.check)}.txt").write_text(result.said + "\n")


def report(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    tally = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
    lines = ["# CUDA suite", "", where(), "", f"{tally}; {sum(r.seconds for r in results):.0f} s.", ""]
    lines += ["| check | outcome | seconds | figures |", "|---|---|---|---|"]
    for result in results:
        figures = "; ".join(map(_in_words, result.figures)) or "-"
        lines.append(f"| {result.check} | {result.outcome} | {result.seconds:.1f} | {figures} |")
    for result in results:
        if result.said:
            lines += ["", f"## {result.check}: {result.outcome}", "", "```", result.said.strip(), "```"]
    return "\n".join(lines) + "\n"


def where() -> str:
    """The machine in one line."""
    plain = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    if not torch.cuda.is_available():
        return f"No CUDA device; {plain}."
    gpu = device_of(torch.device("cuda", 0)).environment(1)
    return (
        f"{torch.cuda.device_count()} x {gpu.device_name} ({(gpu.total_memory_bytes or 0) / 2**30:.1f} GiB), {plain}, "
        f"CUDA {gpu.cuda_version}, cuDNN {gpu.cudnn_version}, driver {gpu.driver_version or 'unknown'}, "
        f"TF32 for {', '.join(gpu.tf32) or 'nothing'}."
    )


def _in_words(figure: Figure) -> str:
    value = figure.value
    text = (
        "not measured"
        if value is None
        else f"{value:,.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else value
    )  # noqa: E501
    return f"{figure.name} {text} {figure.unit}".strip()
