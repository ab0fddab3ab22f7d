"""A measurement or a comparison as one page: headline, timeline, blocks, cost, verdict, hazards, environment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from explorer.plan.hazards.known import hazards
from explorer.plan.memory.ledger import ledger
from explorer.plan.why.caveats import beside_peak
from explorer.plan.why.peak import explain, explain_one
from explorer.record.comparison import Comparison
from explorer.record.failure import Failure
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.view.compare.cost import recompute_cost, recompute_time, step_time
from explorer.view.compare.gradients import (
    buffer_table,
    carried_table,
    gradient_chart,
    parameter_table,
    unjudged_sentence,
    verdict_sentence,
)
from explorer.view.compare.headline import Headline, headlines
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.units import count, mib
from explorer.view.memory.blocks import saved_bytes_chart
from explorer.view.memory.by_block import by_block
from explorer.view.memory.ledger import ledger_chart
from explorer.view.memory.operators import operators_chart
from explorer.view.memory.roles import roles
from explorer.view.memory.timeline import timeline
from explorer.view.report.html import anchor, box, document, drawn, folded, paragraph, section, table
from explorer.view.words.cut_short import did_not_fit, what_failed
from explorer.view.words.policy import in_words

Run = Comparison | Measurement
SECTIONS = ("Memory", "Blocks", "Cost", "Verdict", "Hazards", "Environment")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOf:
    """What is reported. `graph`: of the model, where it is known; hazards are read from it."""

    run: Run
    name: str
    graph: ModelGraph | None = None
    created: float | None = None
    """Seconds since 1970, UTC."""

    @property
    def shown(self) -> Measurement:
        """The candidate, or the one run."""
        return self.run.candidate if isinstance(self.run, Comparison) else self.run

    @property
    def known_graph(self) -> ModelGraph | None:
        """A recorded run brings its own."""
        return self.graph or self.shown.graph


def report_text(of: ReportOf) -> str:
    """The file's text."""
    parts = {
        "Memory": section("Memory", _memory(of)),
        "Blocks": section("Blocks", _blocks(of.run) if of.shown.blocks else []),
        "Cost": section("Cost", _cost(of.run)),
        "Verdict": section("Verdict", _verdict(of.run)),
        "Hazards": section("Hazards", _hazards(of)),
        "Environment": section("Environment", _environment(of)),
    }
    links = "".join(f'<a href="#{anchor(name)}">{name}</a>' for name in SECTIONS if parts[name])
    return document(of.name, [*_head(of), f"<nav>{links}</nav>", *parts.values()])


def charts_of(run: Run) -> dict[str, Chart]:
    """Every chart of a run by the name of its file, in the order of the report."""
    if isinstance(run, Measurement):
        chosen = [timeline(run), roles(run), by_block(run)] if run.allocations is not None else []
        chosen += [ledger_chart(ledger(run), [cost.fqn for cost in run.blocks])] if run.allocations is not None else []
        chosen += [saved_bytes_chart(run), operators_chart(run, "")] if run.blocks else []
        return {chart.name.replace(" ", "-"): chart for chart in chosen}
    charts = {"memory-timeline": timeline(run.baseline, run.candidate)}
    for name, one in (("baseline", run.baseline), ("candidate", run.candidate)):
        if one.allocations is not None:
            charts[f"{name}-by-role"] = roles(one)
            charts[f"{name}-by-block"] = by_block(one)
            charts[f"{name}-at-the-peak"] = ledger_chart(ledger(one), [cost.fqn for cost in one.blocks])
    chosen = [saved_bytes_chart(run), operators_chart(run, "")]
    chosen += [recompute_cost(run), recompute_time(run), step_time(run)] if run.comparable else []
    chosen += [gradient_chart(run)] if run.gradients else []
    return charts | {chart.name.replace(" ", "-"): chart for chart in chosen}


def _head(of: ReportOf) -> Iterator[str]:
    run = of.shown
    yield f"<h1>{escape(of.name)}</h1>"
    when = f", {datetime.fromtimestamp(of.created, UTC):%Y-%m-%d %H:%M} UTC" if of.created is not None else ""
    where = run.recorded_in and f"recorded in {run.recorded_in}"
    model = where or " ".join(filter(None, (run.spec.model.target, run.spec.model.size)))
    host = f"{run.environment.device_name}, torch {run.environment.torch_version}"
    yield paragraph(f"{model}; {host}{when}", "quiet")
    alone = "Forward alone, without gradients."
    yield paragraph(alone if run.spec.forward_only else f"Policy: {in_words(run.spec.policy)}.")
    yield f'<div class="cards">{"".join(map(_card, headlines(of.run)))}</div>'
    if isinstance(of.run, Comparison) and not of.run.comparable:
        yield box([f"The {what_failed(of.run)}: nothing is bought, and nothing is proven."], "error")
    for failure in _failures(of.run):
        yield box([failure.sentence, failure.hint], "error")
    yield paragraph(did_not_fit(run, None), "warn")


def _failures(run: Run) -> list[Failure]:
    holders: tuple[Run, ...] = (run.baseline, run.candidate, run) if isinstance(run, Comparison) else (run,)
    failures = [one.failure for one in holders if one.failure is not None]
    return [
        failure for i, failure in enumerate(failures) if failure.sentence not in {one.sentence for one in failures[:i]}
    ]


def _card(figure: Headline) -> str:
    tone = "" if figure.tone == "neutral" else figure.tone
    delta = f'<span class="{tone}">{escape(figure.delta)}</span>' if figure.delta else ""
    origin = f'<span class="quiet">{", ".join(figure.origin)}</span>'
    inside = f"<span>{figure.label}</span><b>{escape(figure.value)}</b>{delta}{origin}"
    return f'<div class="card" title="{escape(figure.tooltip)}">{inside}</div>'


def _memory(of: ReportOf) -> Iterator[str]:
    run, shown = of.run, of.shown
    if isinstance(run, Comparison):
        yield from map(paragraph, explain(run, of.known_graph))
        yield drawn(timeline(run.baseline, run.candidate), zooms=True)
    else:
        yield from map(paragraph, explain_one(shown, of.known_graph))
        yield drawn(timeline(shown), zooms=True) if shown.allocations is not None else ""
    if shown.allocations is None:
        return
    yield drawn(roles(shown), zooms=True)
    yield drawn(by_block(shown), zooms=True)
    alive = ledger(shown)
    yield paragraph(f"Alive at the peak: {mib(alive.total_bytes)}.")
    yield from (paragraph(caveat, "quiet") for caveat in beside_peak(shown))
    yield drawn(ledger_chart(alive, [cost.fqn for cost in shown.blocks]))


def _blocks(run: Run) -> Iterator[str]:
    yield drawn(saved_bytes_chart(run))
    yield drawn(operators_chart(run, ""))


def _cost(run: Run) -> Iterator[str]:
    if isinstance(run, Comparison) and run.comparable:
        yield drawn(recompute_cost(run))
        yield drawn(recompute_time(run))
        yield drawn(step_time(run))


def _verdict(run: Run) -> Iterator[str]:
    if not isinstance(run, Comparison):
        return
    tone = {"bitwise equal": "good", "rounding": ""}.get(run.verdict, "bad")
    yield f'<p><b class="{tone}">{escape(verdict_sentence(run))}</b></p>'
    yield from map(paragraph, run.causes)
    yield paragraph(run.not_reproducible_because)
    yield paragraph(unjudged_sentence(run), "quiet")
    yield drawn(gradient_chart(run)) if run.gradients else ""
    if wrong := [row for row in buffer_table(run) if row["verdict"] != "bitwise equal"]:
        yield folded("buffers that are not equal", wrong)
    if wrong := [row for row in parameter_table(run) if row["verdict"] != "bitwise equal"]:
        yield folded(f"parameters that are not equal after {count(run.n_steps, 'step')}", wrong)
    yield folded("state that is not equal", carried_table(run))


def _hazards(of: ReportOf) -> Iterator[str]:
    spec = of.shown.spec
    if of.known_graph is None:
        yield paragraph("The model was not at hand when this report was written: its hazards were not looked for.")
        return
    fired = hazards(of.known_graph, spec.policy, spec.plan, spec)
    if not fired:
        yield paragraph("No known hazard in this policy on this model.")
    for hazard in fired:
        blocks = f"Blocks: {', '.join(hazard.blocks)}" if hazard.blocks else ""
        yield box([f"{hazard.severity}: {hazard.sentence}", f"Remedy: {hazard.remedy}", blocks], hazard.severity)


def _environment(of: ReportOf) -> Iterator[str]:
    run = of.shown
    host, spec = run.environment, run.spec
    rows = {
        "device": f"{host.device}, {host.device_name}",
        "memory of the device": mib(host.total_memory_bytes),
        "threads": host.n_threads,
        "torch": host.torch_version,
        "Python": host.python_version,
        "platform": host.platform,
        "CUDA, cuDNN, driver": ", ".join(filter(None, (host.cuda_version, host.cudnn_version, host.driver_version))),
        "types": run.dtype or spec.dtype,
        "autocast": spec.autocast,
        "optimizer": spec.optimizer,
        "mode": spec.mode,
        "seed": spec.seed,
        "microbatches": spec.n_accumulation,
        "timed steps": spec.n_repeats,
    }
    yield table([{"what": name, "value": str(value)} for name, value in rows.items() if value != ""])
    yield from (paragraph(f"Warning: {warning}", "warn") for warning in run.warnings)
    said = "measured by a clock or an allocator"
    if run.origin == "recorded":
        said = "recorded by the same instruments in one step of a script"
    yield paragraph(f"Every figure says where it comes from: {said}, counted, or predicted.")
