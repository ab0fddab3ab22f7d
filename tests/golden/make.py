"""Records the golden run that view and plan tests read: a real comparison, small enough to keep.

    python -m tests.golden.make cpu          # writes tests/golden/cpu.msgpack
    python -m tests.golden.make cuda         # the same on a CUDA machine: tests/golden/cuda.msgpack
    python -m tests.golden.make samples      # sample_models/recorded/*.run, which the page shows on a first visit
    python -m tests.golden.make lessons      # explorer/lab/view/pictures.json: what the cards of the Lab show

Figures of time and bytes in it are those of the machine that made it; the tests check laws, not those figures.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

import msgspec

from explorer.engine.bench.measure import measure
from explorer.engine.compare.compare import compare
from explorer.engine.model.describe import describe
from explorer.lab.engine.run import run_lab
from explorer.lab.plan import lessons as all_lessons
from explorer.lab.record import LessonPicture
from explorer.lab.view.outcome import PICTURES
from explorer.plan.catalogue import SAMPLES, RecordedSample, Sample, catalogue
from explorer.plan.planners.front import find_plans
from explorer.record import Measurement, ModelRef, Policy, RunSpec
from explorer.record.base import to_json, to_msgpack
from explorer.record.plan import Wish, silent

HERE = Path(__file__).parent
TINY: dict[str, int | float | str | bool] = {
    "n_layers": 4, "width": 32, "n_heads": 2, "length": 64, "batch": 4, "vocabulary": 64, "dropout": 0.1,
}  # fmt: skip


def record_sample(sample: Sample, *, n_repeats: int) -> Measurement:
    """The step of a sample model in its first size with everything kept, with the model's graph."""
    spec = RunSpec(model=ModelRef(target=sample.target, size=next(iter(sample.sizes))), n_repeats=n_repeats)
    return msgspec.structs.replace(measure(spec), graph=describe(spec.model))


def samples() -> None:
    folder = SAMPLES / "recorded"
    folder.mkdir(exist_ok=True)
    for sample in catalogue():
        run = record_sample(sample, n_repeats=RunSpec(model=ModelRef(target="")).n_repeats)
        assert run.graph is not None
        recorded = RecordedSample(run=run, front=find_plans(run, run.graph, Wish(), silent))
        path = folder / f"{sample.name}.run"
        path.write_bytes(zlib.compress(to_msgpack(recorded), 9))
        print(f"{path}: {path.stat().st_size:,} bytes, {len(recorded.front.plans)} plans", flush=True)


def lessons() -> None:
    pictures = {}
    for lesson in all_lessons():
        switches = {switch.name: switch.default for switch in lesson.switches}
        outcome = run_lab(lesson.name, switches)
        pictures[lesson.name] = LessonPicture(chart=outcome.chart, answer=outcome.findings[-1])
    PICTURES.write_bytes(msgspec.json.format(to_json(pictures), indent=1) + b"\n")
    print(f"{PICTURES}: {PICTURES.stat().st_size:,} bytes, {len(pictures)} lessons")


def main(device: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA starts; the worker sets it too
    baseline = RunSpec(
        model=ModelRef(target="sample_models/gpt.py", arguments=TINY),
        device="cuda" if device == "cuda" else "cpu",
        optimizer="sgd",
        n_repeats=3,
    )
    candidate = msgspec.structs.replace(baseline, policy=Policy.recompute(["blocks.0", "blocks.2"]))
    path = HERE / f"{device}.msgpack"
    comparison = compare(baseline, candidate)
    if comparison.failure is not None:
        sys.exit(f"{comparison.failure.sentence} {comparison.failure.hint}")
    path.write_bytes(to_msgpack(comparison))
    sentences = dict.fromkeys([*comparison.baseline.warnings, *comparison.candidate.warnings])
    print(f"{path}: {path.stat().st_size:,} bytes, gradients {comparison.verdict}", *sentences, sep="\n")


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    made = {"samples": samples, "lessons": lessons}.get(what)
    made() if made is not None else main(what)
