"""Panel on the peak: its moment, the bytes alive there, and the reason why the policy helped or did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import streamlit as st

from explorer.jobs.on_card import CardCount, CountOnCard
from explorer.plan.memory.ledger import ledger
from explorer.plan.memory.outside import by_place
from explorer.plan.why.caveats import peak_caveats
from explorer.plan.why.collectives import collective_rows, repeated, sent_bytes
from explorer.plan.why.peak import explain, explain_one, next_block, unit_name
from explorer.record.card import CardMemory
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, Unit
from explorer.record.run import RunSpec
from explorer.ui.components import first_picture, step_film
from explorer.ui.explore import work
from explorer.ui.explore.view import View, ledger_of, predicted_line, predicted_on_card
from explorer.ui.explore.work import ExploreState
from explorer.ui.session import page_job, window
from explorer.ui.session.repository import runs
from explorer.ui.session.values import bound
from explorer.ui.shared import draft as drafts
from explorer.ui.shared.charts import draw, finished, made_once, picture, twin
from explorer.ui.shared.elements import escape, fold, frame, horizontal, results_height, small_text
from explorer.ui.shared.tour import panel_height
from explorer.view.drawing.axis import Axis, has_times, positions
from explorer.view.drawing.figure import Chart, Cursor
from explorer.view.drawing.sketch import sketch
from explorer.view.drawing.units import mib
from explorer.view.memory.blocks import ledger_chart, place
from explorer.view.memory.card import add_card, card_chart, cards_of
from explorer.view.memory.film import film
from explorer.view.memory.ranks import ranks_at_peak
from explorer.view.memory.stacked import Ghost, by_block, roles
from explorer.view.memory.timeline import PredictedLine, line_places, pair_answer
from explorer.view.text import explore as glossary
from explorer.view.text.runs import counted_text, notes_of_cards

ABOVE = 108
"""Pixels of the tabs, the title and the choices above the chart."""
LEAST_HEIGHT = 240
OF_CANDIDATE, OF_BASELINE = "Candidate", "Baseline"
"""The run that is drawn in colour; the other run of a comparison is an outline behind it."""
RUN_OF = {OF_CANDIDATE: "candidate", OF_BASELINE: "baseline"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions:
    """What a person has chosen to see of the timelines."""

    view: str
    axis: Axis
    stacked: bool
    block: str
    picked: Cursor
    why: str
    """The reason that stands in the place of figures under the title of a comparison."""


def memory_panel(state: ExploreState, view: View, *, block: str) -> Callable[[], None]:
    """Draws what stands above the timelines, and a sketch of a stand-in's. The function that is returned draws the
    timelines, the ledger at the picked point (the peak by default) and the reasons.

    The panel is empty without a measured baseline.
    """
    picked, baseline, graph = state.tick, view.charted, view.graph
    if baseline is None:
        return lambda: None
    candidate, policy = view.charted_candidate, state.draft.spec.policy
    _above(state, view, baseline, candidate)
    with horizontal("memory_views"):
        title = st.container(width="stretch", gap=None)
        choice = _view_picker(state, candidate)
        axis, stacked = _chart_options(baseline, candidate)
        _film(candidate if candidate is not None and choice == OF_CANDIDATE else baseline, axis)
    height = max(results_height() - ABOVE - panel_height(), LEAST_HEIGHT)
    why = next(iter(_reasons(view, baseline)), "") if choice == OF_CANDIDATE else ""
    state.timeline = choice, axis
    options = TimelineOptions(view=choice, axis=axis, stacked=stacked, block=block, picked=picked, why=why)
    chart, question, answer = made_once(lambda: _picture(view, options), baseline, candidate, str(options))

    def pick(custom: list[Any] | None) -> None:
        state.tick = picked_event(custom, choice) or state.tick

    key = f"memory_{RUN_OF[choice]}_{axis}{'_blocks' if stacked else ''}"
    with title:
        st.markdown(f"**{escape(question)}**")
        st.caption(escape(answer))
    with st.container(height=height, border=False, gap=None, key="first"):
        place = st.container()
        is_sketched = view.comparison is None and stacked and not (policy.units or axis == "time" or block or picked)
        if is_sketched:
            drawing = made_once(lambda: sketch(chart, height, dark=st.context.theme.type == "dark"), chart, height)
            first_picture(drawing, loaded=window.can_draw_charts(), take_loaded=window.note_plotly)

    def rest() -> None:
        if is_sketched and not window.can_draw_charts():
            return
        with place:
            picture(chart, key=key, height=height, act=pick)
        twin(chart, key=key)
        reasons = _reasons(view, baseline)
        _why(state, view, reasons[1:] if choice == OF_CANDIDATE else reasons)
        _ranks(view, candidate or baseline if choice != OF_BASELINE else baseline)
        _alive(baseline, candidate, picked, lambda fqns: _select(state, graph, fqns))

    return rest


def _above(state: ExploreState, view: View, baseline: Measurement, candidate: Measurement | None) -> None:
    """Draws the card that the step was predicted for, and the picked moment."""
    policy = state.draft.spec.policy
    drawn = predicted_on_card(view, policy) if view.candidate is None else None
    if baseline.card is not None:
        state.charted = policy
    _card(baseline, candidate, drawn)
    run = candidate or baseline
    if run.card is not None and run.spec.ranks is None and not run.spec.model.is_recorded:
        _count_on_card(state, run.spec, run.card)
    _picked_moment(state, baseline, candidate)


def _count_on_card(state: ExploreState, spec: RunSpec, memory: CardMemory) -> None:
    """Draws the button that runs the predicted step on an imaginary card, and both figures."""
    st.button(
        "Count with torch's own code", icon=":material/memory:", key="count_on_card", disabled=state.job.id is not None,
        help=glossary.COUNT_ON_CARD, on_click=page_job.start, args=(state.job, CountOnCard(spec=spec)),
    )  # fmt: skip
    count: CardCount | None = work.result(state, "card_count")
    if count is not None and count.spec == spec:
        small_text(escape(counted_text(memory, *count.figures)))


def _film(run: Measurement, axis: Axis) -> None:
    """Draws the button that plays the step of `run`; none for a step that was cut short."""
    log = run.allocations
    if log is None or not run.complete:
        return
    played = made_once(lambda: film(run, positions(run, log, run, axis=axis)), "film", run, axis)
    if played is not None:
        step_film(played)


def first_sketch(view: View, height: int, *, dark: bool) -> str:
    """HTML of the sketch that the panel of a first visit begins with; empty without a measured baseline."""
    first = TimelineOptions(view=OF_BASELINE, axis="tick", stacked=True, block="", picked=None, why="")
    if view.charted is None:
        return ""
    chart, _, _ = made_once(lambda: _picture(view, first), view.charted, None, str(first), dark=dark)
    return sketch(chart, height, dark=dark)


def picked_event(custom: list[Any] | None, choice: str) -> Cursor:
    """Run and event of a clicked point; None for a point that is no event, such as the mark of a collective."""
    if not custom or custom[0] not in ("run", *RUN_OF.values()):
        return None
    name = RUN_OF[choice] if custom[0] == "run" else custom[0]
    return name, int(custom[1])


def _picture(view: View, options: TimelineOptions) -> tuple[Chart, str, str]:
    """The chart of what was measured without its title, the question and the answer of the title."""
    candidate, baseline = view.charted_candidate, view.charted
    assert baseline is not None, "the panel is empty without one"
    runs = {"baseline": baseline} | ({"candidate": candidate} if candidate is not None else {})
    name = RUN_OF[options.view]
    (picked_run, tick) = options.picked or ("", 0)
    cursor = tick if picked_run == name else None
    ghost = next((Ghost(name=other, run=run, of=name) for other, run in runs.items() if other != name), None)
    if options.stacked and not options.block:
        chart = by_block(runs[name], axis=options.axis, cursor=cursor, ghost=ghost)
    else:
        chart = roles(runs[name], block=options.block or None, axis=options.axis, cursor=cursor, ghost=ghost)
    add_card(chart, runs)
    title = chart.figure.layout.title  # the page writes question and answer above the figure
    question, answer = title.text or "", title.subtitle.text or ""
    chart.figure.update_layout(title_text="", title_subtitle_text="", margin_t=8)
    if candidate is not None and not options.block:
        answer = pair_answer(baseline, candidate)
    return chart, question, options.why or answer


def _ranks(view: View, run: Measurement) -> None:
    """Draws all ranks of the drawn `run`, which is the fullest of them, and its collectives."""
    ranks = view.ranks if run is view.charted else None
    ranks = ranks or runs().predicted_ranks(run.spec)
    if ranks is not None:
        draw(ranks_at_peak(ranks), key="ranks_at_peak")
    if not run.collectives:
        return
    st.markdown(f"**Collectives of rank {run.rank}: {mib(sent_bytes(run))} sent**", help=glossary.COLLECTIVES)
    for sentence in repeated(run):
        st.warning(escape(sentence), icon=":material/sync:")
    frame(collective_rows(run), key="collectives", alt="Collectives of the fullest rank")


def _reasons(view: View, baseline: Measurement) -> tuple[str, ...]:
    graph, pair = view.graph, view.comparison
    about = graph.fingerprint if graph else ""  # a toggle does not change measured results
    if pair is not None:
        return made_once(lambda: explain(pair, graph), "reasons", pair, about) if graph else ()
    return made_once(lambda: explain_one(baseline, graph), "reasons", baseline, about)


def line_of(view: View, policy: Policy, choice: str, axis: Axis) -> PredictedLine | None:
    """The dashed line of `policy` in the chart of the run `choice`; None for a policy that ran or has no forecast."""
    baseline, start = view.charted, view.start
    if baseline is None or start is None or start.spec != baseline.spec or view.candidate is not None:
        return None
    if (line := predicted_line(view, policy)) is None:
        return None
    over = view.charted_candidate if choice == OF_CANDIDATE else None
    return line_places(line, baseline, over=over, axis=axis)


def _picked_moment(state: ExploreState, baseline: Measurement, candidate: Measurement | None) -> None:
    """Writes the bytes held at the picked moment above the chart, with a button back to the peak."""
    alive = ledger_of(baseline, candidate, state.tick)
    if alive is None or state.tick is None:
        return
    name, event = state.tick
    largest = ", ".join(f"{place} {mib(size)}" for place, size in list(by_place(alive).items())[:3])
    with st.container(horizontal=True, vertical_alignment="center", key="moment"):
        st.text(f"Event {event:,} of the {name}, {place(alive)}: {mib(alive.total_bytes)} held, most by {largest}.")
        st.button(
            "Back to the peak",
            icon=":material/vertical_align_top:",
            key="to_peak",
            on_click=lambda: setattr(state, "tick", None),
        )


def _chart_options(baseline: Measurement, candidate: Measurement | None) -> tuple[Axis, bool]:
    """The axis of the chart, and whether its areas are blocks instead of roles."""
    with st.popover("Chart", icon=":material/tune:", key="memory_options"):
        timed = st.toggle(
            "Axis in time",
            key="memory_time",
            help="Milliseconds, phase by phase as in steps without recording.",
            disabled=not has_times(baseline, candidate),
        )
        stacked = st.toggle(
            "Stacked by block",
            value=True,
            key="memory_by_block",
            help="One band a block, piling up in forward and draining in backward; what runs again lies on top.",
        )
    return "time" if timed else "tick", stacked


def _view_picker(state: ExploreState, candidate: Measurement | None) -> str:
    """The run to draw; a single choice needs no control."""
    if candidate is None or candidate.allocations is None:
        return OF_BASELINE
    views = [OF_CANDIDATE, OF_BASELINE]
    chosen = state.view if state.view in views else views[0]
    field = bound("memory_view", chosen, lambda view: setattr(state, "view", view))
    st.segmented_control("View", views, default=field.value, required=True, label_visibility="collapsed", **field.wired)
    return str(field.value)


def _select(state: ExploreState, graph: ModelGraph | None, fqns: list[str]) -> None:
    """The first block of a row is selected and scrolled to, as if it were clicked in the graph."""
    fqn = next((fqn for fqn in fqns if graph is not None and fqn in graph.by_fqn and fqn), None)
    if graph is not None and fqn is not None:
        drafts.select(state.draft, graph, fqn)


def _alive(
    baseline: Measurement, candidate: Measurement | None, picked: Cursor, select: Callable[[list[str]], None]
) -> None:
    run = candidate if candidate and (picked is None or picked[0] == "candidate") else baseline
    if run.allocations is None:
        return
    name = "candidate" if run is candidate else "baseline"
    at_picked = ledger_of(baseline, candidate, picked) if picked and picked[0] == name else None
    alive = at_picked or made_once(lambda: ledger(run, None), "ledger", run)
    where = "at the peak" if alive.is_peak else f"at event {alive.tick}"
    st.markdown(f"**Alive {where} of the {name}: {mib(alive.total_bytes)}**", help=glossary.STEP_PEAK)
    st.caption("Click the line above to see another moment, a bar to find its block; ◎ on a block shows its share.")
    for caveat in peak_caveats(run):
        st.caption(escape(caveat))
    names = [cost.fqn for cost in run.blocks]
    chart = made_once(lambda: finished(ledger_chart(alive, names)), "alive", run, None if alive.is_peak else alive.tick)
    draw(chart, key="ledger", act=lambda custom: select(custom[0].split(" ")))


def _why(state: ExploreState, view: View, reasons: tuple[str, ...]) -> None:
    """Draws further reasons, and a button that takes their advice. The chart of a comparison has the first reason."""
    if not reasons:
        return
    with fold("Why, and what next", icon=":material/help:", key="why"):
        for reason in reasons:
            st.text(reason)
        policy, graph = state.draft.spec.policy, view.graph
        run = view.candidate if policy.units else view.charted
        if run is None or graph is None or run.spec.policy.units != policy.units:
            return
        best = made_once(lambda: next_block(run, graph), "next block", run, graph.fingerprint)
        if best is not None:
            st.button(
                f"Recompute {unit_name(best.blocks)}",
                icon=":material/add:",
                key="take_next",
                on_click=drafts.set_policy,
                args=(state.draft, drafts.with_units(policy, (*policy.units, Unit(blocks=best.blocks))), graph),
            )


DRAWN = "drawn policy"


def _card(baseline: Measurement, candidate: Measurement | None, drawn: CardMemory | None) -> None:
    """Draws the card of the runs, if they are predicted for one. `drawn`: the forecast of a policy that did not run."""
    runs = {"baseline": baseline} | ({"candidate": candidate} if candidate is not None else {})
    memories = cards_of(runs) | ({DRAWN: drawn} if drawn is not None else {})
    if not memories:
        return
    chart = card_chart(memories)
    picture(chart, key="card")
    columns = {name: st.column_config.TextColumn(help=meaning) for name, meaning in glossary.CARD.items()}
    frame(list(chart.rows()), key="card_figures", alt="What the step of each run holds on the card", columns=columns)
    with st.container(gap="xsmall"):
        for title, note in notes_of_cards(memories):
            text = f"**{title}:** {escape(note)}"
            small_text(f":red[{text}]" if title == "Refused" else text)
