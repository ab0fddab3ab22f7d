"""The part of a report that answers a reader without a server: blocks to choose, presets, a budget, and what they do.

Python writes what never changes: tables of the step, drawings of the graph, plans with their proof, and sentences.
explorable.js answers each click with replay.js, which forecasts any policy from the tables to the byte.
At the end: the gallery of sample models and lessons, a folder of such pages that a browser opens from disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from msgspec.structs import replace

from explorer.errors import InvalidPolicy
from explorer.plan.challenges import peak_guesses
from explorer.plan.hazards.hazards import hazards
from explorer.plan.policy.counted import counted_units
from explorer.plan.policy.file import dumps, file_of
from explorer.plan.policy.presets import preset, preset_titles
from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.tables import StepTables, step_tables
from explorer.record.base import Record, to_json, to_plain
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan
from explorer.record.policy import KEEP_ALL, Action, Policy, Unit
from explorer.view.drawing.axis import narrowed_from
from explorer.view.drawing.figure import Chart
from explorer.view.drawing.units import byte_axis, mib, percent
from explorer.view.graph import browser
from explorer.view.graph.geometry import layout
from explorer.view.graph.labels import SIGNS, Facts, labels
from explorer.view.graph.nesting import default_open, nest
from explorer.view.memory.timeline import COLOUR, NAME, timeline
from explorer.view.report.html import card, document, drawn, paragraph, section
from explorer.view.text.explore import HEADLINES, LABELS
from explorer.view.text.plan import certificate
from explorer.view.text.tour import STATIC_STEPS

OTHER_POLICY = (
    "This page replays recompute under torch's usual options only. It opens with everything kept, and not with the "
    "policy of the run."
)
APP = "http://localhost:8501/"
"""Where `make app` serves the app."""
CARDS = (
    *((LABELS[key], HEADLINES[key]) for key in HEADLINES if key != "verdict"),
    ("Hazards", "Known ways in which recomputing a chosen block breaks training. The app also checks pairs of blocks."),
)


class Explorable(Record):
    """A step that a reader may recompute in any way: a run that kept everything, and the graph of its model."""

    run: Measurement
    graph: ModelGraph
    plans: Sequence[Plan] = ()
    policy: Policy = KEEP_ALL
    """The policy that the page opens with, if it has torch's usual options and names blocks of the model."""
    lesson: str = ""
    """What the model teaches, in paragraphs."""

    @property
    def first_policy(self) -> Policy:
        """`policy` if the page can draw it, else the policy that keeps everything."""
        usual = replace(self.policy, units=()) == KEEP_ALL
        blocks = all(fqn in self.graph.by_fqn for fqn in self.policy.blocks)
        acts = all(unit.action != "offload" for unit in self.policy.units)
        return self.policy if usual and blocks and acts else KEEP_ALL


def keep_all_run(run: Record, graph: ModelGraph | None) -> Measurement | None:
    """The step of `run` with everything kept, measured or derived; None without a whole timeline or a graph."""
    start = run.baseline if isinstance(run, Comparison) else run
    if not isinstance(start, Measurement) or graph is None or not start.phases or start.spec.forward_only:
        return None
    keep_all = keep_all_from(start, graph)
    log = keep_all.allocations if keep_all is not None else None
    return keep_all if log is not None and len(log.calls.block) else None


def explorable(step: Explorable) -> str:
    """The section; empty if nothing can be forecast from the run."""
    forecaster = Forecaster(step.run, step.graph)
    presets = _presets(step.graph)
    chosen = [step.first_policy, *presets.values(), *(plan.policy for plan in step.plans)]
    tables = step_tables(step.run, step.graph, [unit for policy in chosen for unit in policy.units])
    if tables is None or forecaster.baseline is None or step.run.allocations is None:
        return ""
    data = to_json(_data(step, tables, presets, forecaster)).decode().replace("<", "\\u003c")
    cards = "".join(card(label, "", tooltip, ()) for label, tooltip in CARDS)
    notice = OTHER_POLICY
    if step.first_policy == step.policy:
        notice = ""
    parts = [
        _path(step),
        paragraph(notice),
        f'<div class="cards live">{cards}</div><p class="answer" aria-live="polite"></p>',
        _tools(presets, step.plans),
        f'<div class="columns"><div class="blocks"></div><div>{drawn(_chart(step.run))}'
        f'<p class="quiet proof"></p>{_lesson(step)}</div></div>',
        _take_away(step),
        f'<script type="application/json" class="explorable-data">{data}</script>',
    ]
    return section("Choose blocks", parts).replace("<section ", '<section class="explorable" ', 1)


def _data(
    step: Explorable, tables: StepTables, presets: Mapping[str, Policy], forecaster: Forecaster
) -> dict[str, object]:
    graph, run = step.graph, step.run
    largest = run.held_peak_bytes or 0
    return {
        "tables": tables,
        "policy": _units(step.first_policy),
        "presets": {name: _units(policy) for name, policy in presets.items()},
        "plans": [_plan(plan) for plan in step.plans],
        "graph": _graph(graph, run),
        "order": [block.fqn for block in graph.blocks],
        "counted": list(dict.fromkeys(fqn for unit in counted_units(graph) for fqn in unit)),
        "following": graph.next_in_turn,
        "hazards": _hazards(step, tables),
        "axis": [*narrowed_from(run), *byte_axis(largest)],
        "colour": COLOUR,
        "guesses": _guesses(run, presets, forecaster),
        "file": dumps(file_of(KEEP_ALL, graph)),
        "name": file_stem(run.spec.model),
        "address": _address(run),
    }


def file_stem(model: ModelRef) -> str:
    """The model's name as part of a file name that any system takes."""
    return re.sub(r"\W+", "-", model.target.removesuffix(".py").rpartition("/")[2]).strip("-") or "model"


def _units(policy: Policy) -> list[dict[str, object]]:
    return [{"blocks": unit.blocks, "save_ops": unit.save_ops} for unit in policy.units]


def _presets(graph: ModelGraph) -> dict[str, Policy]:
    """The presets of the app's menu that choose blocks of this model, and `keep-all`."""
    chosen: dict[str, Policy] = {}
    for name in preset_titles():
        try:
            policy = preset(name, graph)
        except InvalidPolicy:  # no block of this model is worth recomputing by itself
            continue
        if policy.units or name == "keep-all":
            chosen[name] = policy
    return chosen


def _plan(plan: Plan) -> dict[str, object]:
    word = "FLOPs" if plan.cost_unit == "FLOPs" else "time"
    cost = "" if plan.cost_ratio is None else f"{percent(plan.cost_ratio - 1, signed=True)} {word}"
    return {
        "units": _units(plan.policy),
        "peak": plan.step_peak_bytes,
        "cost": plan.extra_cost,
        "words": f"{mib(plan.step_peak_bytes)} for {cost or 'an unknown cost'}",
        "proof": certificate(plan)[0],
    }


def _graph(graph: ModelGraph, run: Measurement) -> dict[str, object]:
    """Drawings with ever more containers open: a click that folds or unfolds takes the nearest of them."""
    nodes = nest(graph)
    depth: dict[str, int] = {"": -1}
    for node in nodes.values():  # parents come before children
        if node.parent is not None:
            depth[node.id] = depth[node.parent] + 1
    first = set(default_open(graph, runs=True))
    levels: dict[str, dict[str, object]] = {}
    for n in range(max(depth.values()) + 2):
        opened = {
            id for id, node in nodes.items() if node.children and id and (depth[id] < n - 1 or (n and id in first))
        }
        drawing = layout(graph, opened)
        levels.setdefault(
            drawing.shape, {"open": sorted(opened), "shape": drawing.shape, "geometry": browser.geometry(drawing)}
        )
    facts = Facts(graph=graph, policy=KEEP_ALL, baseline=run)
    saved = {block.fqn: block.saved_bytes for block in graph.blocks}
    saved |= {cost.fqn: cost.saved_after_forward_bytes for cost in run.blocks if cost.fqn in saved}
    return {
        "levels": list(levels.values()),
        "labels": {id: browser.short_label(label) for id, label in labels(facts).items()},
        "members": {node.id: node.members for node in nodes.values() if node.members},
        "saved": saved,
        "colours": browser.COLOURS,
    }


def _hazards(step: Explorable, tables: StepTables) -> dict[int, list[tuple[str, str, str]]]:
    """Badges of each unit that a hazard names, by its place in the tables."""
    badges: dict[int, list[tuple[str, str, str]]] = {}
    for place, unit in enumerate(tables.units):
        action: Action = "save_ops" if unit.save_ops else "recompute"
        alone = Policy(units=(Unit(blocks=unit.blocks, action=action, save_ops=unit.save_ops),))
        for hazard in hazards(step.graph, alone, None, step.run.spec):
            if hazard.severity != "note":
                badge = SIGNS[hazard.severity], hazard.severity, f"{hazard.sentence} {hazard.remedy}"
                badges.setdefault(place, []).append(badge)
    return badges


def _guesses(run: Measurement, presets: Mapping[str, Policy], forecaster: Forecaster) -> list[dict[str, object]]:
    peak, saved = run.step_peak_bytes, run.saved_after_forward_bytes
    predicted = forecaster.peak_bytes(presets["all"]) if "all" in presets else None
    if peak is None or saved is None or predicted is None:
        return []
    return [to_plain(guess) for guess in peak_guesses(peak, saved, predicted)]


def _address(run: Measurement) -> dict[str, object] | None:
    """The parts of the app's address beside the policy; None: the model cannot be loaded there."""
    model = run.spec.model
    if model.is_recorded:
        return None
    query = {"model": model.target, "size": model.size, "weights": model.weights}
    spec = to_plain(run.spec) | {"model": to_plain(ModelRef(target="", arguments=model.arguments))}
    return {"app": APP, "query": {name: value for name, value in query.items() if value}, "spec": spec}


def _chart(run: Measurement) -> Chart:
    """The timeline of the run; explorable.js draws the line of the policy over it."""
    chart = timeline(run)
    chart.figure.add_scatter(
        x=[None], y=[None], name=NAME, mode="lines", hoverinfo="skip",
        line={"width": 2, "dash": "dash", "color": COLOUR},
    )  # fmt: skip
    chart.figure.update_layout(legend={"itemclick": False, "itemdoubleclick": False})
    return chart


def _path(step: Explorable) -> str:
    """The guided path: a step at a time, the guess among them."""
    run = step.run
    figures = {
        "peak": mib(run.step_peak_bytes),
        "saved": mib(run.saved_after_forward_bytes),
        "model": run.spec.model.target.rpartition("/")[2],
    }
    steps = "".join(
        f'<div class="step" data-step="{part.key}"><b>{i} of {len(STATIC_STEPS)} · {escape(part.title)}</b>'
        f"<p>{_marked(part.text.format(**figures))}</p></div>"
        for i, part in enumerate(STATIC_STEPS, start=1)
    )
    buttons = '<button data-go="-1">Back</button><button data-go="1">Next</button><button data-go="0">Leave</button>'
    return (
        f'<div class="box path"><div>{steps}<div class="row guesses"></div></div><div class="row">{buttons}</div></div>'
    )


def _lesson(step: Explorable) -> str:
    parts = "".join(f"<p>{_marked(part)}</p>" for part in step.lesson.split("\n\n") if part)
    return f"<details open><summary>What this model teaches</summary>{parts}</details>" if parts else ""


def _marked(text: str) -> str:
    """Escaped text with **bold**, *emphasis* and `code`."""
    for mark, tag in ((r"\*\*", "b"), (r"\*", "em"), ("`", "code")):
        text = re.sub(f"{mark}(.+?){mark}", rf"<{tag}>\1</{tag}>", escape(text) if tag == "b" else text)
    return text


def _tools(presets: Mapping[str, Policy], plans: Sequence[Plan]) -> str:
    titles = preset_titles()
    buttons = "".join(f'<button data-preset="{name}">{escape(titles[name])}</button>' for name in presets)
    slider = (
        '<label class="row budget"><span>Budget</span><input type="range" min="0" max="1000" step="1" value="1000">'
        "<output></output></label>"
    )
    history = '<button data-act="undo">Undo</button><button data-act="join" hidden></button>'
    return f'<div class="row presets">{buttons}{history}</div>{slider if plans else ""}'


def _take_away(step: Explorable) -> str:
    acts = {"file": "Policy file", "link": "Copy a link to this state"}
    if not step.run.spec.model.is_recorded:
        acts["app"] = "Open in the app on this machine"
    buttons = "".join(f'<button data-act="{act}">{title}</button>' for act, title in acts.items())
    how = 'policy = explorer.load_policy("policy.yaml")\nexplorer.apply_policy(model, policy)'
    return f'<div class="row take">{buttons}</div><pre>{escape(how)}</pre>'


class Exhibit(Record):
    """A page of the gallery."""

    file: str
    title: str
    line: str
    """Content of the page in a sentence."""
    shelf: str
    """`Sample models`, or the theme of a lesson."""


def index_text(exhibits: Sequence[Exhibit]) -> str:
    """The first page: every other one by shelf."""
    origin = (
        "Choose blocks of a model, and see what a training step saves and costs. The pages need no server and no "
        "network. Lessons ran on the machine that made this gallery; the page of a model names its machine."
    )
    cards: dict[str, str] = {}
    for exhibit in exhibits:
        inside = f"<b>{escape(exhibit.title)}</b>{paragraph(exhibit.line, 'quiet')}"
        link = f'<a href="{escape(exhibit.file)}"><div class="card">{inside}</div></a>'
        cards[exhibit.shelf] = cards.get(exhibit.shelf, "") + link
    parts = [section(shelf, [f'<div class="gallery">{inside}</div>']) for shelf, inside in cards.items()]
    return document(
        "Checkpoint Explorer: gallery", ["<h1>Checkpoint Explorer</h1>", paragraph(origin, "quiet"), *parts]
    )
