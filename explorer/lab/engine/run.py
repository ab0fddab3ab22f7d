"""Runs one lesson of the lab: a real run of seconds, computed each time, with global state restored.

A lesson is a file in lessons/, named with underscores for its hyphens; its function `run` runs it.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Mapping

import torch

from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, NotOnThisDevice
from explorer.lab.engine.kit.bench import Answer, LabBench
from explorer.lab.plan import lesson_called, settings
from explorer.lab.record import LabOutcome
from explorer.record.graph import ModelRef
from explorer.record.plan import Report, silent
from explorer.record.run import Device


def run_lab(
    name: str,
    switches: Mapping[str, str],
    *,
    device: Device = "cpu",
    model: ModelRef | None = None,
    report: Report = silent,
) -> LabOutcome:
    """Runs the lesson called `name`; switches without a value stand at their defaults.

    Raises BadInput (unknown lesson, switch or value; a model for a lesson that brings its own) and NotOnThisDevice.
    """
    lesson = lesson_called(name)
    if model is not None and not lesson.takes_model:
        raise BadInput(f"The experiment {name} brings its own nets, and a model was named.", hint="Leave it out.")
    setting = settings(lesson, switches)
    if device == "cuda" and not torch.cuda.is_available():
        raise NotOnThisDevice("The lab was asked to run on CUDA, and torch finds no CUDA device.", hint="Use the CPU.")
    bench = LabBench(torch.device(device), report, model)
    bench.tell(lesson.title, 0, 1)
    file = importlib.import_module(f"explorer.lab.engine.lessons.{name.replace('-', '_')}")
    start = time.perf_counter()
    with preserve_global_state(), warnings.catch_warnings(action="ignore"):
        torch.set_num_threads(1)  # two round differently from one
        answer: Answer = file.run(setting, bench)
    return LabOutcome(
        experiment=name,
        switches=setting,
        device=device,
        rows=answer.rows,
        chart=answer.chart,
        findings=answer.findings,
        printed=answer.printed,
        seconds=time.perf_counter() - start,
    )
