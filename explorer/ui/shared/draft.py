"""The run that a visitor draws on any page: model, policy and options, with undo, without measured results.

Steps of the Explore page's graph, its tools and its slider arrive in `absorb`. Another model has another graph widget,
so that late steps for the old widget cannot reach the new widget. The widget's name shows pages whose results are about
another model.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import streamlit as st
from msgspec.structs import replace

from explorer.errors import BadInput, ExplorerError
from explorer.plan.card.allocator_options import parse_options
from explorer.plan.card.cards import parse_card
from explorer.plan.policy import block_names as decision
from explorer.plan.policy.presets import preset
from explorer.record.base import to_json
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import Ranks, RunSpec
from explorer.ui import components
from explorer.ui.components import BrowserStep, GraphMarks
from explorer.ui.session import address, backend, window
from explorer.ui.session.repository import runs
from explorer.ui.session.values import once_a_press, session_value
from explorer.view.graph.nesting import ancestors, default_open
from explorer.view.text import explore as glossary

T = TypeVar("T")
MOST_STEPS = 100
"""Undo goes back this far."""


@dataclass(slots=True)
class History(Generic[T]):
    """Decisions that can be taken back and made again, the latest last."""

    past: list[T] = field(default_factory=list)
    future: list[T] = field(default_factory=list)

    def record(self, before: T) -> None:
        """Adds a step that restores `before`; undone steps are dropped."""
        self.past = [*self.past, before][-MOST_STEPS:]
        self.future = []

    def step(self, opposite: Callable[[T], T], *, forward: bool) -> T | None:
        """Returns the value that the last step restores, or None without a step; `opposite` makes the reverse step."""
        source, other = (self.future, self.past) if forward else (self.past, self.future)
        if not source:
            return None
        before = source.pop()
        other.append(opposite(before))
        return before


def undo_buttons(history: History[Any], act: Callable[..., None], help: tuple[str, str], *, prefix: str = "") -> None:
    """Draws Undo and Redo, where there is something to do, with their help texts.

    A press calls `act` with `forward`, True to redo.
    """
    for name, text, steps in (("undo", help[0], history.past), ("redo", help[1], history.future)):
        if not steps:
            continue
        st.button(
            name.capitalize(),
            icon=f":material/{name}:",
            key=f"{prefix}{name}",
            help=text,
            on_click=once_a_press(act),
            kwargs={"forward": name == "redo"},
        )


@dataclass(slots=True, kw_only=True)
class Draft:
    """A person's decisions. Changed in place: parts of a page hold the draft between drawings."""

    spec: RunSpec
    """The drawn run: the candidate."""
    predict: bool = False
    """True: the step is simulated without data, so nothing is allocated and nothing runs."""
    widget: str = field(default_factory=lambda: f"block_graph_{secrets.token_hex(4)}")
    """Key of the Explore page's graph."""
    marks: GraphMarks | None = None
    """State of the graph, as the page knows it; None until the graph is drawn."""
    plans: dict[int, tuple[tuple[Unit, ...], ...]] = field(default_factory=dict)
    """Units that each place of the slider draws, by version of the plans."""
    slid: Policy | None = None
    """Policy that the slider drew last: a drag is one step of undo."""
    history: History[Policy] = field(default_factory=History)
    """Policies before the drawn policy, and undone policies."""
    redraw: bool = False
    """More than the graph has to be drawn again."""
    undone: bool = False
    """A decision was undone or redone: what was typed about the policy is out of date."""
    jump: tuple[str, int] | None = None
    """Block to scroll to, and how many jumps there were."""
    message: str = ""
    """Reason why the address, or a typed option, could not be read."""


def current() -> Draft:
    """This visitor's draft; on the first visit the draft of the address bar, else the first model on offer."""
    return session_value("draft", Draft, lambda: first_draft(st.query_params.to_dict()))


def first_draft(query: Mapping[str, str]) -> Draft:
    """The draft of a visit to the address with `query`."""
    usual = RunSpec(model=backend.in_default_size(ModelRef(target=backend.samples()[0].target)))
    try:
        spec = address.from_query(query)
        if spec is not None and not (spec.model.is_recorded and runs().recorded_run(spec.model)):
            backend.check_offered(spec.model)
            spec = replace(spec, model=backend.in_default_size(spec.model))
    except ExplorerError as error:
        return Draft(spec=usual, message=str(error), predict=backend.predicts())
    predict = query.get("predict")
    only_predicted = spec is not None and (spec.card is not None or spec.ranks is not None)
    requested = backend.predicts() if predict is None else predict == "1"
    return Draft(spec=_unsplit(spec or usual), predict=only_predicted or requested)


def _unsplit(spec: RunSpec) -> RunSpec:
    """The specification without a pipeline plan. The Pipeline page holds the plan, and no other page runs it."""
    return replace(spec, plan=None)


def graph_of(draft: Draft) -> ModelGraph | None:
    """Graph of the drawn model, if described lately."""
    return runs().graph(draft.spec, without_data=draft.predict)


def why_not_run(draft: Draft) -> str:
    """Reason why the drawn model cannot run here; empty if the model can run."""
    if draft.spec.model.is_recorded:
        return glossary.NO_MODEL
    if draft.spec.ranks is not None and not draft.predict:
        return glossary.MEASURED_RANKS
    return glossary.NOTHING_RUNS if draft.predict else ""


def restart(draft: Draft, spec: RunSpec, *, predict: bool = False) -> None:
    """Resets the draft to `spec`, as on a first visit."""
    fresh = Draft(spec=_unsplit(spec), predict=predict)
    for field_ in fields(Draft):
        setattr(draft, field_.name, getattr(fresh, field_.name))


def choose_model(draft: Draft, model: ModelRef) -> None:
    """Resets the draft to another model or size; the options of the step stay."""
    spec = replace(draft.spec, model=model, policy=KEEP_ALL, frozen=(), forward_only=False)
    if not draft.predict:
        spec = replace(spec, ranks=None)
    restart(draft, spec, predict=draft.predict)
    to_address(draft)


def set_predict(draft: Draft, *, on: bool) -> None:
    """Switches prediction on or off and starts the model afresh; the policy stays. Predictions use the CPU, and card
    and ranks are options of predictions alone."""
    changed: dict[str, Any] = {"device": "cpu"} if on else {"card": None, "ranks": None}
    restart(draft, replace(draft.spec, **changed), predict=on)
    to_address(draft)


def set_card(draft: Draft, text: str) -> None:
    """Predicts for the card that `text` names, such as `b200` or `24 GiB`; empty: for no card.

    A text that names no card becomes the draft's message.
    """
    with _reading(draft):
        card = parse_card(text) if text else None
        if card is not None and draft.spec.card is not None:
            card = replace(card, options=draft.spec.card.options)
        choose(draft, replace(draft.spec, card=card))
        if card is not None and not draft.predict:
            set_predict(draft, on=True)


def set_allocator(draft: Draft, options: Iterable[str]) -> None:
    """Sets the options of the card's allocator. Options that cannot be read become the draft's message."""
    assert draft.spec.card is not None, "the options are offered beside a card"
    with _reading(draft):
        parse_options(text := ",".join(options))
        choose(draft, replace(draft.spec, card=replace(draft.spec.card, options=text)))


@contextmanager
def _reading(draft: Draft) -> Iterator[None]:
    """A context that reads a typed option: a fault becomes the draft's message, else there is none."""
    draft.message = ""
    try:
        yield
    except BadInput as error:
        draft.message = f"{error.sentence} {error.hint}"


def set_ranks(draft: Draft, ranks: Ranks | None) -> None:
    """Predicts the step of every rank of `ranks`; None: of one process."""
    choose(draft, replace(draft.spec, ranks=ranks))
    if ranks is not None and not draft.predict:
        set_predict(draft, on=True)


def choose(draft: Draft, spec: RunSpec) -> None:
    """Sets other options; policy, marks and measured results stay."""
    draft.spec = spec
    to_address(draft)


def set_option(draft: Draft, graph: ModelGraph | None, name: str, value: object) -> None:
    """Sets an option of the step or of its policy; an option of the policy is a step of undo."""
    spec = draft.spec
    if name not in Policy.__struct_fields__:
        choose(draft, replace(spec, **{name: value}))
        return
    policy = replace(spec.policy, **{name: value})
    if graph is not None:
        set_policy(draft, policy, graph)
    else:
        choose(draft, replace(spec, policy=policy))


def marks_of(draft: Draft, graph: ModelGraph) -> GraphMarks:
    """The state of the drawn graph, made on first use."""
    if draft.marks is None:
        draft.marks = GraphMarks(open=list(default_open(graph)))
    return draft.marks


def absorb(draft: Draft, graph: ModelGraph, *, until_press: bool = False) -> None:
    """Takes over new steps of the browser; a changed policy goes on the undo list.

    With `until_press`, takes over only the steps before the button whose callback calls this function.
    """
    message = st.session_state.get(draft.widget)
    draft.redraw |= window.take(message)
    steps = components.new_steps(marks_of(draft, graph), message, until_press=until_press)
    for step in steps:
        take_step(draft, graph, step)
    if steps:
        to_address(draft)


def take_step(draft: Draft, graph: ModelGraph, step: BrowserStep) -> None:
    """Takes over one step. A pattern or preset that chooses nothing becomes the draft's message."""
    if step.kind in ("undo", "redo"):
        undo(draft, forward=step.kind == "redo")
    elif step.kind == "place":
        _slide(draft, step)
    elif step.kind == "jump":
        draft.jump = unfolded(marks_of(draft, graph), graph, "".join(step.ids), draft.jump)
        draft.redraw = True
    elif step.kind in ("preset", "match"):
        with _reading(draft):
            _record(draft, _chosen(draft.spec.policy, graph, step))
        draft.redraw |= bool(draft.message)
    elif step.kind in ("on", "join"):
        _record(draft, _chosen(draft.spec.policy, graph, step))
    else:
        components.look(marks_of(draft, graph), step)
        draft.redraw |= step.kind == "select"


def _chosen(policy: Policy, graph: ModelGraph, step: BrowserStep) -> Policy:
    """`policy` after a step that chooses blocks; its options stay. Raises BadInput."""
    name, *_ = step.ids or ("",)
    if step.kind == "preset":
        return with_units(policy, preset(name, graph).units)
    if step.kind == "join":
        return decision.joined(policy, name, step.ids[-1])
    if step.kind == "match":
        matches = decision.matching(name, [block.fqn for block in graph.blocks if block.fqn and block.n_calls])
        new = Policy.recompute(fqn for fqn in matches if fqn not in policy.blocks).units
        return with_units(policy, (*policy.units, *new))
    blocks = [fqn for fqn in step.ids if fqn in graph.by_fqn or fqn in policy.blocks]
    return decision.policy_after(policy, components.flipped(policy.blocks, blocks), graph)


REMEMBERED_PLANS = 8
"""Number of versions of the slider's plans whose moves may still arrive."""


def offer_plans(draft: Draft, plans: tuple[tuple[Unit, ...], ...]) -> int:
    """Notes the units that each place of the slider draws. Returns the version that a move names.

    The version is a checksum: a move in the preview of the page is right on the page if both have the same plans.
    """
    version = zlib.crc32(to_json(plans))
    draft.plans.pop(version, None)
    draft.plans[version] = plans
    if len(draft.plans) > REMEMBERED_PLANS:
        del draft.plans[next(iter(draft.plans))]
    return version


def _slide(draft: Draft, step: BrowserStep) -> None:
    """Draws the plan that the slider was moved to; moves one after another are one step of undo."""
    plans, before = draft.plans.get(step.version, ()), draft.spec.policy
    if not 0 <= step.place < len(plans):
        return
    _record(draft, with_units(before, plans[step.place]))
    if draft.slid == before and draft.spec.policy != before and len(draft.history.past) > 1:
        draft.history.past.pop()
    draft.slid = draft.spec.policy


def set_policy(draft: Draft, policy: Policy, graph: ModelGraph) -> None:
    """A policy from elsewhere, an option of the policy: one step of undo."""
    absorb(draft, graph, until_press=True)
    _record(draft, policy)
    to_address(draft)


def undo(draft: Draft, *, forward: bool = False) -> None:
    """Undoes one decision; `forward` redoes it."""
    policy = draft.history.step(lambda _: draft.spec.policy, forward=forward)
    if policy is not None:
        draft.undone = True
        _take_over(draft, policy)


def _record(draft: Draft, policy: Policy) -> None:
    if policy != draft.spec.policy:
        draft.history.record(draft.spec.policy)
        _take_over(draft, policy)


def _take_over(draft: Draft, policy: Policy) -> None:
    """Sets the policy. A click does not redraw the options of a policy, so a change of options redraws the page."""
    draft.redraw |= with_units(policy, ()) != with_units(draft.spec.policy, ())
    draft.spec = replace(draft.spec, policy=policy)


def unfolded(marks: GraphMarks, graph: ModelGraph, fqn: str, jump: tuple[str, int] | None) -> tuple[str, int]:
    """Unfolds whatever hides `fqn`; returns the jump to `fqn` that follows `jump`."""
    marks.open = list(dict.fromkeys([*marks.open, *ancestors(graph, fqn)]))
    return fqn, jump[1] + 1 if jump else 1


def select(draft: Draft, graph: ModelGraph, fqn: str) -> None:
    """Selects `fqn` and scrolls to it, from outside the graph."""
    absorb(draft, graph)
    marks = marks_of(draft, graph)
    marks.selected = fqn
    draft.jump = unfolded(marks, graph, fqn, draft.jump)


def to_address(draft: Draft) -> None:
    """Writes the decision into the address bar."""
    address.show(to_query(draft))


def to_query(draft: Draft) -> dict[str, str]:
    """The address of the draft; `predict` is named if it differs from the start option of the app."""
    predict = {} if draft.predict == backend.predicts() else {"predict": str(int(draft.predict))}
    return address.to_query(draft.spec) | predict


def with_units(policy: Policy, units: tuple[Unit, ...]) -> Policy:
    """`policy` with other units; its options stay."""
    return replace(policy, units=units)
