"""Parts of every report: name, circumstances, failure, environment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from explorer.record.comparison import Comparison
from explorer.record.failure import Failure
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Environment, Measurement, RecordedRanks
from explorer.record.pipeline_run import PipelineRun
from explorer.record.run import RunSpec
from explorer.view.drawing.units import mib
from explorer.view.report.html import anchor, box, document, paragraph, table

Reported = Comparison | Measurement | RecordedRanks | PipelineRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOf:
    """Subject of a report. `graph`: the model's graph if known; hazards are found in the graph."""

    run: Reported
    name: str
    graph: ModelGraph | None = None
    created: float | None = None
    """Seconds since 1970, UTC."""
    share_plotly: bool = False
    """Whether plotly.js lies in the report's folder instead of in the report."""

    @property
    def spec(self) -> RunSpec:
        """The spec of the candidate, or of the single run."""
        return self.run.candidate.spec if isinstance(self.run, Comparison) else self.run.spec

    @property
    def known_graph(self) -> ModelGraph | None:
        """The graph in the run's record, else `graph`."""
        run = self.run.candidate if isinstance(self.run, Comparison) else self.run
        run = run.fullest if isinstance(run, RecordedRanks) else run
        recorded = run.graph if isinstance(run, (Measurement, PipelineRun)) else None
        return recorded or self.graph


def page(of: ReportOf, head: Iterable[str], parts: Mapping[str, str]) -> str:
    """The file: name, head, links to the sections that have something to say, the sections."""
    links = "".join(f'<a href="#{anchor(name)}">{name}</a>' for name, part in parts.items() if part)
    body = [f"<h1>{escape(of.name)}</h1>", *head, f"<nav>{links}</nav>", *parts.values()]
    return document(of.name, body, share_plotly=of.share_plotly)


def circumstances(of: ReportOf, place: str, host: Environment | None) -> str:
    """A quiet line: the place, the device and the date of the run."""
    when = f", {datetime.fromtimestamp(of.created, UTC):%Y-%m-%d %H:%M} UTC" if of.created is not None else ""
    machine = f"; {host.device_name}, torch {host.torch_version}" if host is not None else ""
    return paragraph(f"{place}{machine}{when}", "quiet")


def model_in_words(spec: RunSpec) -> str:
    """`sample_models/gpt.py small`"""
    return " ".join(filter(None, (spec.model.target, spec.model.size)))


def failure_boxes(failures: Iterable[Failure | None]) -> Iterator[str]:
    """Each failure once, in a frame."""
    for failure in {one.sentence: one for one in failures if one is not None}.values():
        yield box([failure.sentence, failure.hint], "error")


def environment(host: Environment | None, spec: RunSpec, run: Measurement | None = None) -> Iterator[str]:
    """Device, versions and options of the run; for a recorded step, the options found at recording."""
    recorded = run is not None and run.origin == "recorded"
    rows = {} if host is None else {
        "device": f"{host.device}, {host.device_name}",
        "memory of the device": "" if host.total_memory_bytes is None else mib(host.total_memory_bytes),
        "threads": host.n_threads,
        "torch": host.torch_version,
        "Python": host.python_version,
        "platform": host.platform,
        "CUDA, cuDNN, driver": ", ".join(filter(None, (host.cuda_version, host.cudnn_version, host.driver_version))),
    }  # fmt: skip
    rows |= {
        "types": run.dtype if run is not None and run.dtype else spec.dtype,
        "autocast": spec.autocast,
        "optimizer": spec.optimizer,
        "mode": spec.mode,
        "microbatches": spec.plan.n_microbatches if spec.plan is not None else spec.n_accumulation,
        "seed": spec.seed,
        "timed steps": spec.n_repeats,
    }
    unseen = {"seed", "timed steps"} if recorded else set()
    unseen |= {"optimizer"} if recorded and spec.optimizer == "none" else set()
    if recorded and run is not None and not run.phases:
        unseen |= {"types", "autocast", "mode", "microbatches"}
    shown = {name: value for name, value in rows.items() if value != "" and name not in unseen}
    yield table([{"what": name, "value": str(value)} for name, value in shown.items()])
