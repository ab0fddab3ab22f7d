"""Runs every check it finds, a process a file, and goes on whatever happens to one of them.

    file of checks ─▶ a process ─▶ one line of results.jsonl a check, written when it ends
                                   the process died: the check under way has crashed, a new one takes the rest

A device-side assertion ends a CUDA context, a crash the process: neither may take the checks behind it along.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from explorer.engine.device.device import device_of
from tests.gpu.kit import Bench, Check, Figure, Outcome, Result, attempt

ROOT = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).parent / "checks"
PACKAGE = "tests.gpu.checks"
RESULTS = "results.jsonl"
SHARES_S = {
    "memory": 150.0, "limits": 95.0, "verdicts": 75.0, "streams": 25.0, "kernels": 30.0, "ranks": 20.0,
    "forecasts": 45.0, "clocks": 30.0, "page": 10.0,
}  # fmt: skip
"""Files of checks in the order in which they run, with the seconds of each: bytes and verdicts before clocks.

A file may also use what the files before it left over. Checks that have not begun by then are skipped, and said to be.
"""
OTHER_SHARE_S = 30.0
"""Seconds of a file that SHARES_S does not name."""
CHECK_LIMIT_S = 150.0
CRASHED: Outcome = "crashed"
SKIPPED: Outcome = "skipped"
"""Also of a check that the end of its file's time cut short: nothing is known of it."""


def files(folder: Path = CHECKS) -> list[str]:
    """The files of checks in the order of SHARES_S, then others by name."""
    found = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    return [*(file for file in SHARES_S if file in found), *sorted(found - SHARES_S.keys())]


def checks_of(file: str, package: str = PACKAGE) -> dict[str, Check]:
    """The functions `check_...` of a file, in the order in which they stand there."""
    module = importlib.import_module(f"{package}.{file}")
    return {f"{file}.{name}": value for name, value in vars(module).items() if name.startswith("check_")}


def variants(file: str, package: str = PACKAGE) -> tuple[dict[str, str], ...]:
    """Environments in which a file runs, once each: what is read when CUDA starts cannot be changed later."""
    return getattr(importlib.import_module(f"{package}.{file}"), "VARIANTS", ({},))


def run_all(
    out: Path,
    arguments: Sequence[str],
    *,
    wanted: Sequence[str] = (),
    folder: Path = CHECKS,
    package: str = PACKAGE,
    patience: float = 1.0,
) -> list[Result]:
    """`arguments` are those of the child: device, tiny. Every result is in the report as soon as it is there.

    `patience` multiplies every limit of time, for a machine that is not paid by the minute.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULTS).write_text("")
    ends = time.monotonic()
    for file in [file for file in files(folder) if not wanted or file in wanted]:
        ends += patience * SHARES_S.get(file, OTHER_SHARE_S)
        limits = Limits(ends, patience * CHECK_LIMIT_S)
        for variant in variants(file, package):
            _run_file(out, f"{package}:{file}", variant, arguments, limits)
    return results(out)


class Limits(NamedTuple):
    """On the clock of `time.monotonic`."""

    ends: float
    """Of the file."""
    check_s: float
    """Of a check. The check that reaches it hangs."""


def _run_file(out: Path, place: str, variant: dict[str, str], arguments: Sequence[str], limits: Limits) -> None:
    package, _, file = place.partition(":")
    mark = "".join(f" [{name}={value}]" for name, value in variant.items())
    names = [name + mark for name in checks_of(file, package)]
    while left := [name for name in names if name not in {result.check for result in results(out)}]:
        rest_s = limits.ends - time.monotonic()
        if rest_s <= 0:
            for name in left:
                add(out, Result(name, "skipped", said=f"the time for {file} was over"))
            break
        command = [sys.executable, "-m", "tests.gpu", "--child", place, "--out", str(out), *arguments]
        command += ["--mark", mark, "--only", *left]
        seconds = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **variant}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                timeout=min(limits.check_s, rest_s), check=False,
            )  # fmt: skip
            outcome, ended, words = CRASHED, f"its process ended with {done.returncode}", done.stderr
        except subprocess.TimeoutExpired as error:
            outcome = CRASHED if rest_s > limits.check_s else SKIPPED
            ended, words = f"no result after {error.timeout:.0f} s", error.stderr or b""
        after = {result.check for result in results(out)}
        if under_way := [name for name in left if name not in after][:1]:
            tail = words.decode(errors="replace")[-4000:]
            add(out, Result(under_way[0], outcome, time.monotonic() - seconds, said=f"{ended}\n{tail}"))
    write_report(out, results(out))


def run_child(out: Path, place: str, mark: str, only: Sequence[str], bench: Bench) -> None:
    """In the process of one file."""
    package, _, file = place.partition(":")
    for name, check in checks_of(file, package).items():
        if name + mark in only:
            fresh = Bench(bench.device, bench.folder, bench.tiny)
            add(out, attempt(name + mark, check, fresh))


def add(out: Path, result: Result) -> None:
    with (out / RESULTS).open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def results(out: Path) -> list[Result]:
    lines = (out / RESULTS).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Result) for line in lines]


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
    if value is None:
        return f"{figure.name} not measured"
    text = value if isinstance(value, str) else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return f"{figure.name} {text} {figure.unit}".strip()
