"""The report of every kind of run: one HTML page that needs no server. The figures equal the figures of the app.

`ReportOf` names the subject. Each kind of run has its function; name, circumstances, failures and environment are
parts of every report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TypeVar

from explorer import slices
from explorer.plan.hazards.hazards import hazards
from explorer.plan.memory.ledger import ledger
from explorer.plan.predict.not_predicted import no_baseline
from explorer.plan.why.caveats import peak_caveats
from explorer.plan.why.checkpointing import checkpointing_rows, not_comparable_because, sides
from explorer.plan.why.peak import explain, explain_one
from explorer.record.base import Record
from explorer.record.comparison import Comparison, TensorDiff
from explorer.record.failure import Failure
from explorer.record.graph import ModelGraph
from explorer.record.history import DeviceHistory, MemoryHistory
from explorer.record.measurement import Environment, Measurement, RecordedRanks
from explorer.record.plan import Plan
from explorer.record.run import RunOfSlice, RunSpec
from explorer.view.compare.cost import recompute_cost, recompute_time, step_time
from explorer.view.compare.gradients import carried_table, diff_table, gradient_chart, scope_sentence, verdict_sentence
from explorer.view.compare.headline import headlines
from explorer.view.drawing.rows import runs_of
from explorer.view.drawing.units import count, mib
from explorer.view.memory.blocks import ledger_chart, operators_chart, saved_bytes_chart
from explorer.view.memory.card import add_card, card_chart, cards_of
from explorer.view.memory.ranks import rank_rows, ranks_at_peak, ranks_over_time, spread_of_ranks
from explorer.view.memory.stacked import by_block, roles
from explorer.view.memory.timeline import alone, timeline
from explorer.view.report.explorable import Explorable, explorable, keep_all_run
from explorer.view.report.html import anchor, box, card, document, drawn, folded, paragraph, picture, section, table
from explorer.view.text.explore import Headline
from explorer.view.text.plan import in_words
from explorer.view.text.runs import (
    alive_rows,
    did_not_fit,
    history_notes,
    history_rows,
    notes_of_cards,
    refusal_rows,
    what_failed,
)

Reported = Comparison | Measurement | RecordedRanks | MemoryHistory | RunOfSlice


class ReportOf(Record):
    """Subject of a report. `graph`: the model's graph if known; hazards are found in the graph."""

    run: Reported
    name: str
    graph: ModelGraph | None = None
    created: float | None = None
    """Seconds since 1970, UTC."""
    share_plotly: bool = False
    """Whether plotly.js lies in the report's folder instead of in the report."""
    plans: tuple[Plan, ...] = ()
    """Plans found for the step with everything kept, for the budget of the page."""
    lesson: str = ""
    """What the model teaches, in paragraphs."""

    @property
    def spec(self) -> RunSpec:
        """The spec of the candidate, or of the single run."""
        return self.run.candidate.spec if isinstance(self.run, Comparison) else self.run.spec

    @property
    def known_graph(self) -> ModelGraph | None:
        """The graph in the run's record, else `graph`."""
        run = _shown(self.run)
        if isinstance(run, RecordedRanks):
            run = run.fullest
        recorded: ModelGraph | None = getattr(run, "graph", None)
        return recorded or self.graph


R = TypeVar("R")


def _shown(run: Comparison | R) -> Measurement | R:
    """The candidate, or the single run."""
    return run.candidate if isinstance(run, Comparison) else run


def page(of: ReportOf, head: Iterable[str], parts: Mapping[str, str | Iterable[str]]) -> str:
    """The file: name, head, links to the sections that have something to say, the sections.

    `parts`: the content of each section by its title, or the whole section.
    """
    sections = {name: part if isinstance(part, str) else section(name, part) for name, part in parts.items()}
    links = "".join(f'<a href="#{anchor(name)}">{name}</a>' for name, text in sections.items() if text)
    body = [f"<h1>{escape(of.name)}</h1>", *head, f"<nav>{links}</nav>", *sections.values()]
    return document(of.name, body, share_plotly=of.share_plotly)


def circumstances(of: ReportOf, place: str, host: Environment | None) -> str:
    """A quiet line: the place, the device and the date of the run."""
    line = place
    if host is not None:
        line += f"; {host.device_name}, torch {host.torch_version}"
    if of.created is not None:
        line += f", {datetime.fromtimestamp(of.created, UTC):%Y-%m-%d %H:%M} UTC"
    return paragraph(line, "quiet")


def model_in_words(spec: RunSpec) -> str:
    """`sample_models/gpt.py small`"""
    return " ".join(filter(None, (spec.model.target, spec.model.size)))


def failure_boxes(failures: Iterable[Failure | None]) -> Iterator[str]:
    """Each failure once, in a frame."""
    for failure in {failure.sentence: failure for failure in failures if failure is not None}.values():
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


def report_text(of: ReportOf) -> str:
    """Text of the HTML file: plotly.js (5 MB), and about 1 MB of figures for a small model."""
    match of.run:
        case RecordedRanks():
            return ranks_report(of, of.run)
        case MemoryHistory():
            return history_report(of, of.run)
        case Comparison() | Measurement():
            return run_report(of, of.run)
        case _:
            reports = (part.REPORTS for part in slices.parts("view.report").values())
            return str(next(kinds[type(of.run)] for kinds in reports if type(of.run) in kinds)(of, of.run))


Run = Comparison | Measurement


def run_report(of: ReportOf, run: Run) -> str:
    """The file's text."""
    shown, choice = _shown(run), _choose_blocks(of, run)
    charts = (saved_bytes_chart(run), operators_chart(run, "")) if shown.blocks else ()
    parts = {
        "Choose blocks": choice,
        "Memory": _memory(of, run, drawn_above=bool(choice)),
        "Blocks": [drawn(chart if isinstance(run, Comparison) else alone(chart)) for chart in charts],
        "Cost": _cost(run),
        "Verdict": _verdict(run),
        "Hazards": hazard_section(of),
        "Environment": _environment(shown),
    }
    return page(of, _head(of, run, figures=not choice or isinstance(run, Comparison)), parts)


def _choose_blocks(of: ReportOf, run: Run) -> str:
    start, graph = keep_all_run(run, of.known_graph), of.known_graph
    if start is None or graph is None:
        return ""
    return explorable(Explorable(run=start, graph=graph, plans=of.plans, policy=of.spec.policy, lesson=of.lesson))


def _head(of: ReportOf, run: Run, *, figures: bool) -> Iterator[str]:
    shown = _shown(run)
    where = shown.recorded_in and f"recorded in {shown.recorded_in}"
    yield circumstances(of, where or model_in_words(shown.spec), shown.environment)
    alone = "Forward alone, without gradients."
    if figures:
        yield paragraph(alone if shown.spec.forward_only else f"Policy: {in_words(shown.spec.policy)}.")
        yield f'<div class="cards">{"".join(map(figure_card, headlines(run)))}</div>'
        if not isinstance(run, Comparison) and (because := no_baseline(run)):
            yield paragraph(f"No block can be chosen in this file. {because}")
    if isinstance(run, Comparison) and not run.comparable:
        yield box([f"The {what_failed(run)}: nothing is bought, and nothing is proven."], "error")
    yield from failure_boxes(holder.failure for holder in (*runs_of(run).values(), run))
    yield paragraph(did_not_fit(shown, None), "warn")


def figure_card(figure: Headline) -> str:
    """A headline figure as a card."""
    tone, origin = figure.tone.removeprefix("neutral"), ", ".join(figure.origin)
    return card(figure.label, figure.value, figure.tooltip, [(figure.delta, tone), (origin, "quiet")])


def _memory(of: ReportOf, run: Run, *, drawn_above: bool) -> Iterator[str]:
    if isinstance(run, Comparison):
        yield from map(paragraph, explain(run, of.known_graph))
        yield from _on_card(runs_of(run))
        yield drawn(add_card(timeline(run.baseline, run.candidate), runs_of(run)))
        yield from by_role_and_block(run.candidate)
    else:
        yield from memory_of_one(run, of.known_graph, with_timeline=not drawn_above)


def memory_of_one(run: Measurement, graph: ModelGraph | None, *, with_timeline: bool = True) -> Iterator[str]:
    """Reasons for the peak, and all pictures of the run's memory."""
    yield from map(paragraph, explain_one(run, graph))
    yield from _on_card({"this run": run})
    if with_timeline and run.allocations is not None and run.phases:
        yield drawn(add_card(alone(timeline(run)), {"this run": run}))
    yield from by_role_and_block(run)


def _on_card(runs: Mapping[str, Measurement]) -> Iterator[str]:
    if memories := cards_of(runs):
        yield drawn(card_chart(memories))
        yield from (paragraph(f"{title}: {note}.") for title, note in notes_of_cards(memories))


def by_role_and_block(run: Measurement) -> Iterator[str]:
    """Charts of bytes over the step and at the peak. A run without phases has the peak only, without a log nothing."""
    if run.allocations is None:
        return
    if run.phases:
        yield drawn(roles(run))
        yield drawn(by_block(run))
    alive = ledger(run)
    when = "Known to be held when it was refused"
    if run.phases:
        when = "Alive at the peak"
    yield paragraph(f"{when}: {mib(alive.total_bytes)}.")
    yield from (paragraph(caveat, "quiet") for caveat in peak_caveats(run))
    yield drawn(ledger_chart(alive, [cost.fqn for cost in run.blocks]))


def _cost(run: Run) -> Iterator[str]:
    if table := checkpointing_rows(runs_of(run)["baseline"]):
        yield folded("checkpointing by the model itself", table)
    if isinstance(run, Comparison) and run.comparable:
        yield drawn(recompute_cost(run))
        yield drawn(recompute_time(run))
        yield drawn(step_time(run))


def _verdict(run: Run) -> Iterator[str]:
    if not isinstance(run, Comparison):
        return
    tone = {"bitwise equal": "good", "rounding": ""}.get(run.verdict, "bad")
    yield f'<p><b class="{tone}">{escape(verdict_sentence(run))}</b></p>'
    yield from map(paragraph, (*sides(run), *run.causes))
    yield paragraph(not_comparable_because(run))
    yield paragraph(scope_sentence(run), "quiet")
    if run.gradients:
        yield drawn(gradient_chart(run))
    families: dict[str, Sequence[TensorDiff]] = {
        "buffers that are not equal": run.buffers,
        f"parameters that are not equal after {count(run.n_steps, 'step')}": run.parameters,
    }
    for title, diffs in families.items():
        if wrong := [diff for diff in diffs if diff.verdict != "bitwise equal"]:
            yield folded(title, diff_table(wrong))
    yield folded("state that is not equal", carried_table(run))


def hazard_section(of: ReportOf) -> Iterator[str]:
    """Known hazards of the policy on this model."""
    spec = of.spec
    if of.known_graph is None:
        yield paragraph("The hazards are unknown: the run file holds no graph of its model.")
        return
    fired = hazards(of.known_graph, spec.policy, spec.plan, spec)
    if not fired:
        yield paragraph("No known hazard in this policy on this model.")
    for hazard in fired:
        blocks = f"Blocks: {', '.join(hazard.blocks)}" if hazard.blocks else ""
        yield box([f"{hazard.severity}: {hazard.sentence}", f"Remedy: {hazard.remedy}", blocks], hazard.severity)


def _environment(run: Measurement) -> Iterator[str]:
    yield from environment(run.environment, run.spec, run)
    yield from (paragraph(f"Warning: {warning}", "warn") for warning in run.warnings)
    if run.origin == "predicted":
        yield paragraph("Every figure is predicted: nothing of this step was run.")
        return
    instruments = "measured by a clock or an allocator"
    if run.origin == "recorded":
        instruments = "recorded by the same instruments in one step of a script"
    yield paragraph(f"Every figure says where it comes from: {instruments}, counted, or predicted.")


def ranks_report(of: ReportOf, ranks: RecordedRanks) -> str:
    """The file's text."""
    full = ranks.fullest
    parts = {
        "Ranks": [picture(ranks_over_time(ranks)), drawn(ranks_at_peak(ranks)), table(rank_rows(ranks))],
        f"Rank {full.rank}": memory_of_one(full, of.known_graph),
        "Hazards": hazard_section(of),
        "Environment": environment(full.environment, full.spec, full),
    }
    head = [
        circumstances(of, f"recorded in {ranks.recorded_in}", full.environment),
        paragraph(f"Policy: {in_words(full.spec.policy)}."),
        paragraph(spread_of_ranks(ranks)),
        *failure_boxes(run.failure for run in ranks.ranks),
    ]
    return page(of, head, parts)


def history_report(of: ReportOf, history: MemoryHistory) -> str:
    """The file's text: a section for each device."""
    pairs = zip(history.devices, history.runs)
    parts = {device.label: _history(device, run) for device, run in pairs}
    return page(of, [circumstances(of, f"{history.source} {history.file}", None)], parts)


def _history(device: DeviceHistory, run: Measurement) -> Iterator[str]:
    """The timeline, peaks under each of the options, refused requests, and what is alive at the peak."""
    yield drawn(alone(timeline(run)))
    yield table(history_rows(device))
    yield from (paragraph(note, "quiet") for note in history_notes(device))
    if device.refused:
        yield table(refusal_rows(device))
    yield table(alive_rows(run, "module"))
    yield table(alive_rows(run, "source line"))
