"""What one visitor has decided and what is shown to them: plain values, so a reload of the code harms nothing.

spec      the run as it is drawn now (model, policy, options)     policy marks live in `marks` between two reruns
baseline  key of the measured baseline                            shown     key of the last comparison
job       what the worker does for this page                      failure   why the last job has no result
asked     Run was pressed and has not started yet                 redraw    more than the graph has to be drawn again
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
import streamlit as st

from explorer.errors import BadInput, ExplorerError
from explorer.plan.catalogue import Sample
from explorer.plan.policy import marks as decision
from explorer.record.base import from_plain, to_plain
from explorer.record.failure import Failure
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import KEEP_ALL, Policy, Unit
from explorer.record.run import RunSpec
from explorer.ui import block_graph
from explorer.ui.session import address as link
from explorer.ui.session import window
from explorer.view.graph.nesting import ancestors, default_open

KEPT_STEPS = 100
"""Undo goes back this far."""
BY_ROLE = "by role"
"""The view of the memory chart that shows a selected block; None: both runs."""
State = dict[str, Any]


def current(default: ModelRef, samples: tuple[Sample, ...]) -> State:
    """This visitor's state; on the first visit what the address bar says, else the `default` model."""
    if "explore" not in st.session_state:
        message, spec = "", None
        try:
            spec = link.from_query(st.query_params.to_dict())
            if spec is not None:
                check_offered(spec.model, samples)
        except ExplorerError as error:
            spec, message = None, str(error)
        st.session_state["explore"] = fresh(spec or RunSpec(model=default))
        st.session_state["explore"]["message"] = message
    found: State = st.session_state["explore"]
    return found


def check_offered(model: ModelRef, samples: tuple[Sample, ...]) -> None:
    """Raises BadInput unless `model` is on the list: links and run files must not make this machine load others."""
    sample = next((sample for sample in samples if sample.target == model.target), None)
    if sample is None:
        raise BadInput(
            f"The model {model.target} is not offered here.",
            hint=f"Start the app with `-- --model {model.target}` if you trust it.",
        )
    if model.size is not None and model.size not in sample.sizes:
        raise BadInput(f"{sample.name} has no size {model.size}.", hint=f"It has {', '.join(sample.sizes) or 'none'}.")
    usual = sample.sizes.get(model.size or next(iter(sample.sizes), ""), {})
    wrong = [name for name, value in model.arguments.items() if type(value) is not type(usual.get(name))]
    if wrong:
        raise BadInput(f"{sample.name} takes no argument {', '.join(wrong)} of that type.")


def fresh(spec: RunSpec) -> State:
    """The state of somebody who just chose `spec`."""
    return {
        "spec": to_plain(spec),
        # Another model is another widget: marks under way for the old graph must not reach the new one.
        "widget": f"block_graph_{secrets.token_hex(4)}",
        "marks": None,
        "undo": [],
        "redo": [],
        "baseline": None,
        "shown": None,
        "pictures": None,
        "matrix": None,
        "asked": False,
        "job": None,
        "failure": None,
        "tick": None,
        "redraw": False,
        "view": None,
        "jump": None,
        "n_jumps": 0,
        "message": "",
        "warning": "",
        "doubt": "",
    }


def spec_of(state: State) -> RunSpec:
    """The run as it is drawn now: the candidate."""
    return from_plain(state["spec"], RunSpec)


def baseline_of(state: State) -> RunSpec:
    """What the candidate is compared with: everything kept, or the policy of the pinned run."""
    spec = spec_of(state)
    pinned = (from_plain(plain, RunSpec) for plain in st.session_state.get("pinned", ()))
    policy = next((one.policy for one in pinned if one.model == spec.model), KEEP_ALL)
    return msgspec.structs.replace(spec, policy=policy)


def choose_model(state: State, model: ModelRef) -> None:
    """Another model, or another size of it, starts afresh; how the step is run stays."""
    spec = msgspec.structs.replace(spec_of(state), model=model, policy=KEEP_ALL, plan=None, frozen=())
    state.update(fresh(spec))
    to_address(state)


def choose(state: State, spec: RunSpec) -> None:
    """Other options: policy, marks and what was measured stay."""
    state["spec"] = to_plain(spec)
    to_address(state)


def set_option(state: State, graph: ModelGraph | None, name: str, value: Any) -> None:
    """One option of the step, or of its policy: that is a step of undo too."""
    spec = spec_of(state)
    if name not in Policy.__struct_fields__:
        choose(state, msgspec.structs.replace(spec, **{name: value}))
        return
    policy = msgspec.structs.replace(spec.policy, **{name: value})
    if graph is not None:
        set_policy(state, policy, graph)
    else:
        choose(state, msgspec.structs.replace(spec, policy=policy))


def marks_of(state: State, graph: ModelGraph) -> State:
    """The state of the drawn graph, made on first use from the policy."""
    found: State | None = state["marks"]
    if found is None:
        found = state["marks"] = block_graph.fresh(default_open(graph))
        found["on"] = list(spec_of(state).policy.blocks)
    return found


def absorb(state: State, graph: ModelGraph, *, until_press: bool = False) -> None:
    """Takes over what was clicked since the last look; a changed policy goes on the undo list.

    With `until_press` only what was clicked before the button whose callback calls this.
    """
    marks = marks_of(state, graph)
    said = st.session_state.get(state["widget"])
    state["redraw"] |= window.take(said)
    selected = marks["selected"]
    if not block_graph.adopt(marks, said, until_press=until_press):
        return
    if marks["selected"] != selected:
        state["redraw"], state["view"] = True, BY_ROLE if marks["selected"] else None
    policy = spec_of(state).policy
    if set(marks["on"]) != set(policy.blocks):
        _record(state, decision.policy_after(policy, marks["on"], graph))


def set_policy(state: State, policy: Policy, graph: ModelGraph) -> None:
    """A preset, an import, an option of the policy: one step of undo."""
    absorb(state, graph, until_press=True)
    if policy == spec_of(state).policy:
        return
    _record(state, policy)
    block_graph.replace(marks_of(state, graph), policy.blocks)


def undo(state: State, graph: ModelGraph, *, forward: bool = False) -> None:
    """One decision back, or forward again."""
    absorb(state, graph, until_press=True)
    source, other = ("redo", "undo") if forward else ("undo", "redo")
    if not state[source]:
        return
    state[other].append(state["spec"]["policy"])
    _take_over(state, state[source].pop())
    block_graph.replace(marks_of(state, graph), spec_of(state).policy.blocks)
    to_address(state)


def join(state: State, graph: ModelGraph, blocks: tuple[str, str]) -> None:
    """Recomputes two blocks as one segment."""
    absorb(state, graph, until_press=True)
    set_policy(state, decision.joined(spec_of(state).policy, *blocks), graph)


def _record(state: State, policy: Policy) -> None:
    state["undo"] = [*state["undo"], state["spec"]["policy"]][-KEPT_STEPS:]
    state["redo"] = []
    _take_over(state, to_plain(policy))
    to_address(state)


def _take_over(state: State, policy: dict[str, Any]) -> None:
    """The options of a policy stand outside of what a click draws again: where they change, the page is."""
    now = state["spec"]["policy"]
    state["redraw"] |= any(value != now.get(name) for name, value in policy.items() if name != "units")
    state["spec"] = {**state["spec"], "policy": policy}


def jump_to(state: State, graph: ModelGraph, fqn: str) -> None:
    """Unfolds whatever hides `fqn` and scrolls to it."""
    marks = marks_of(state, graph)
    marks["open"] = list(dict.fromkeys([*marks["open"], *ancestors(graph, fqn)]))
    state["n_jumps"] += 1
    state["jump"] = [fqn, state["n_jumps"]]


def select(state: State, graph: ModelGraph, fqn: str) -> None:
    """Selects `fqn` and scrolls to it, from outside the graph."""
    absorb(state, graph)
    marks_of(state, graph)["selected"] = fqn
    jump_to(state, graph, fqn)


def fail(state: State, failure: Failure | ExplorerError) -> None:
    """What went wrong is a result too: it stays on the page until the next run."""
    if isinstance(failure, ExplorerError):
        failure = Failure(kind="bad input", sentence=failure.sentence, hint=failure.hint)
    state["failure"] = to_plain(failure)


def to_address(state: State) -> None:
    """Writes the decision, and the job under way, into the address bar."""
    query = link.to_query(spec_of(state))
    if state["job"]:
        query["job"] = state["job"]["id"]
    if st.query_params.to_dict() != query:
        st.query_params.from_dict(query)


def with_units(policy: Policy, units: tuple[Unit, ...]) -> Policy:
    """`policy` with other units; its options stay."""
    return msgspec.structs.replace(policy, units=units)
