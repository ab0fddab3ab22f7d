"""The headline strip: measured figures if they are about the drawn policy, else predictions."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from explorer.plan.names import actions_text, recomputed_blocks, recomputed_share
from explorer.record.graph import Hazard
from explorer.record.measurement import Measurement
from explorer.record.plan import Forecast
from explorer.record.policy import Policy
from explorer.ui.components import Cell
from explorer.ui.explore.view import View
from explorer.ui.session.repository import runs
from explorer.ui.shared.elements import escape
from explorer.view.compare.before_run import (
    COUNTED,
    MEASURED,
    PREDICTED,
    PRESS,
    bytes_before_run,
    flops_before_run,
    gradients_before_run,
    headlines_of_part,
    time_before_run,
)
from explorer.view.compare.headline import headlines
from explorer.view.drawing.units import NOT_MEASURED, mib
from explorer.view.text import explore as glossary
from explorer.view.text.explore import Headline, PageAnswer
from explorer.view.text.plan import in_words
from explorer.view.text.runs import what_failed

OPENED = "opened run"
RECORDED = ("recorded",)
FOLLOWS = {
    PageAnswer("none"): {"flop_ratio": "follows", "time_ratio": "follows"},
    PageAnswer("measured", "part of the baseline"): {"time_ratio": "being timed"},
}
"""Text in the place of a figure that the run under way brings, by answer and figure."""
INSTEAD = {"recorded": "record again", "predicted": "nothing runs"}
"""Text instead of a figure that no run can measure, by source."""
COLOURS: dict[str, Literal["green", "red", "gray"]] = {"good": "green", "bad": "red", "neutral": "gray"}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The drawn policy, and its facts known without a run."""

    policy: Policy
    forecast: Forecast = Forecast()
    hazards: tuple[Hazard, ...] = ()
    worth: frozenset[str] = frozenset()
    """Blocks worth recomputing, chosen or not."""

    @cached_property
    def chosen(self) -> str:
        """`6 of 12 blocks`: the blocks chosen to run again, of the blocks that presets count if the graph is read."""
        return recomputed_share(self.policy, self.worth)


def cells(view: View, drawn: Drawn) -> tuple[Cell, ...]:
    """The strip: each figure with its meaning and its origin."""
    before = {}
    if view.comparison is not None and view.stale:
        before = {headline.key: headline.value for headline in headlines(view.comparison)}
    follows = FOLLOWS.get(view.answer, {}) if view.is_running else {}
    shown = (
        replace(headline, value=follows[headline.key], delta="") if headline.key in follows else headline
        for headline in figures(view, drawn)
    )
    return tuple(_cell(headline, view, was=before.get(headline.key, "")) for headline in shown)


def answer(view: View, drawn: Drawn, title: str = "") -> str:
    """The page's answer on the drawn policy in one sentence, Markdown; empty if nothing is chosen or predicted.

    `title`: the name of the policy, if the policy is a preset.
    """
    values = {headline.key: headline.value for headline in figures(view, drawn)}
    before, arrow, after = values["step_peak_bytes"].partition(" → ")
    if not drawn.policy.units or not arrow:
        return ""
    time = values["time_ratio"].partition(" ±")[0]
    costs = [f"{values['flop_ratio']} FLOPs", time if "timed" in time else f"{time} time"]
    price = ", ".join(cost for cost in costs if not cost.startswith(NOT_MEASURED))
    name = title or actions_text(drawn.policy, drawn.worth)
    sentence = f"{name}: {before} to {after} for {price}; gradients {values['verdict']}."
    return f"**{escape(sentence)}**"


def freshness_line(view: View, sentence: str) -> str:
    """`sentence` on the drawn policy, and words for the runs that the figures are about."""
    answer, baseline, pair = view.answer, view.baseline, view.comparison
    where = view.stand_in.in_words if view.stand_in is not None else ""
    if baseline is not None and answer.source == "recorded":
        where = _recorded_where(baseline)
    failure = escape(what_failed(pair)) if pair is not None else ""
    line = glossary.ANSWERS[answer][-1 if sentence else 0].format(figures=sentence, where=where, failure=failure)
    if view.baseline_policy is not None and answer.source != "recorded":
        against = glossary.FITTED if view.did_not_fit else glossary.OPENED
        return f"{against} {escape(in_words(view.baseline_policy))}. {line}"
    if answer == PageAnswer("measured") and not sentence:
        created, one_module = runs().created(view.baseline_key), view.graph is not None and len(view.graph.blocks) == 1
        stored = "" if created is None else f"Stored {glossary.ago(time.time() - created)}."
        return f"{line} {'' if one_module else glossary.CHOOSE} {stored}"
    return line


def _recorded_where(run: Measurement) -> str:
    """Where `run` was recorded, and why the page cannot run it."""
    if run.spec.ranks is not None:
        return f"{escape(run.recorded_in or run.spec.ranks.in_words)}. {glossary.MEASURED_RANKS}"
    return f"{escape(run.recorded_in)}. {glossary.NO_MODEL}"


def figures(view: View, drawn: Drawn) -> tuple[Headline, ...]:
    """Peak, saved, FLOPs, time, gradients, recomputed blocks: always six, so that nothing moves."""
    comparison = view.comparison
    if comparison is not None and not view.stale:
        measured = headlines(comparison)
        if view.is_part and comparison.comparable:
            measured = headlines_of_part(comparison, goes_on=view.is_running)
        return tuple(_chosen(headline, drawn) for headline in measured)
    before_run = _drawn(view.baseline or view.charted, drawn, INSTEAD.get(view.answer.source))
    if view.graph is None and view.answer == PageAnswer("none"):  # Run has nothing to run
        return tuple(replace(figure, delta=figure.delta.replace(PRESS, "")) for figure in before_run)
    return before_run


def _chosen(headline: Headline, drawn: Drawn) -> Headline:
    """The number of chosen blocks among blocks worth recomputing, if all of them ran again; else the run's count."""
    if headline.key != "n_recompute" or headline.value == NOT_MEASURED or headline.delta:
        return headline
    runs = "would run again" if headline.origin == PREDICTED else "ran again"
    return replace(
        headline, value=drawn.chosen, delta=f"all {runs}" if recomputed_blocks(drawn.policy) else "none chosen"
    )


def _cell(headline: Headline, view: View, *, was: str) -> Cell:
    """`was` is the measured figure of an earlier policy, shown dimmed."""
    compared = view.against and headline.origin and headline.key != "n_recompute"
    sources: tuple[str, ...] = headline.origin
    if view.imaginary_card and headline.origin in (MEASURED, RECORDED):
        sources = ("imaginary card",)
    origin = ", ".join(sources) + (f", against {view.against}" if compared else "")
    if view.stand_in is not None and headline.origin == MEASURED:
        origin = "earlier" if view.stand_in.here else "another machine"
    origins = glossary.ORIGIN | ({"predicted": glossary.PREDICTED_ORIGIN} if view.predicted else {})
    return Cell(
        label=headline.label,
        value=headline.value,
        delta=" · ".join(filter(None, [headline.delta, was and origin])),
        colour=COLOURS[headline.tone],
        help=" ".join([headline.tooltip, *map(origins.__getitem__, sources)]),
        below=f"before: {was}" if was else origin,
    )


def _drawn(base: Measurement | None, drawn: Drawn, instead: str | None) -> tuple[Headline, ...]:
    """Figures before a run: the baseline measured, the policy predicted. `instead`: the text if Run has no use."""
    policy = drawn.policy
    forecast = drawn.forecast if policy.units else Forecast()
    of_base = "everything kept"
    if base and base.spec.policy.units:
        of_base = "this policy" if base.spec.policy == policy else OPENED
    peak, saved = (base.step_peak_bytes, base.saved_after_forward_bytes) if base else (None, None)
    headlines: tuple[Headline, ...] = (
        bytes_before_run("step_peak_bytes", peak, forecast.step_peak_bytes, of_base),
        bytes_before_run("saved_after_forward_bytes", saved, forecast.saved_after_forward_bytes, of_base),
        flops_before_run(forecast.flop_ratio, is_base=base is not None and not policy.units),
        time_before_run(base, forecast, of_base),
        gradients_before_run(drawn.hazards),
        Headline(key="n_recompute", value=drawn.chosen, delta="chosen" if recomputed_blocks(policy) else "none chosen"),
    )
    if forecast.host_peak_bytes is not None:
        more = {"step_peak_bytes": f"{mib(forecast.host_peak_bytes)} on the host", "time_ratio": "without copies"}
        headlines = tuple(
            replace(headline, delta=", ".join(filter(None, (headline.delta, more.get(headline.key)))))
            for headline in headlines
        )
    if base is None or base.origin == "measured":
        return headlines
    not_measured = (MEASURED, COUNTED) if base.origin == "predicted" else (MEASURED,)
    return tuple(
        replace(
            headline,
            origin=(base.origin,) if headline.origin in not_measured else headline.origin,
            delta=instead or headline.delta if headline.delta == PRESS else headline.delta,
        )
        for headline in headlines
    )
