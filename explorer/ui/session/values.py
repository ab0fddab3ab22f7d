"""Values that a visitor's session keeps between runs of a page, and widgets that show and change them.

A record has the true value of a widget; `bound` replaces a widget that differs:

    a person chooses ──▶ callback: the record changes before the page is drawn ──▶ the same widget, same value
    undo, a link, an import, another model, a refused number ──▶ the record differs from the widget
    ──▶ another widget takes its place, with the record's value

The new widget has a new key because the browser owns the value of an existing widget. The browser would send the old
value back, even from a closed popover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import streamlit as st
from streamlit.runtime.app_session import AppSession, AppSessionState
from streamlit.runtime.scriptrunner import RerunData, ScriptRunner
from streamlit.runtime.scriptrunner_utils.script_requests import ScriptRequests
from streamlit.runtime.scriptrunner_utils.script_run_context import ThreadState, get_script_run_ctx

T = TypeVar("T")
GO_TO = "go_to"
RETRY_S = 0.005
"""Time between two looks at Streamlit: whether a runner has ended."""
_is_whole = ContextVar("is_whole", default=False)


def session_value(name: str, kind: type[T], first: Callable[[], T]) -> T:
    """The visitor's object under `name`; `first` makes it on the first visit, and after the code of `kind` changed."""
    value = st.session_state.get(name)
    if type(value) is not kind:
        st.session_state[name] = value = first()
    return value


class Bound(NamedTuple):
    """Arguments of a widget: its key, the record's value as its default, and the callback for a choice."""

    key: str
    value: Any
    on_change: Callable[[], None]

    @property
    def wired(self) -> dict[str, Any]:
        """Key and callback as the widget takes them: `st.toggle(label, field.value, **field.wired)`."""
        return {"key": self.key, "on_change": self.on_change}


def bound(name: str, value: object, take: Callable[[Any], object]) -> Bound:
    """Arguments of a widget that shows the record's `value`; `take` writes a person's choice into the record."""
    drawn: dict[str, tuple[int, object]] = st.session_state.setdefault("bound", {})
    n, last = drawn.get(name, (0, value))
    n += last != value
    drawn[name] = (n, value)
    key = f"{name}~{n}" if n else name

    def changed() -> None:
        # Streamlit also calls when a browser first echoes the default, and for a widget that another page has just
        # replaced under the same key, which then has no value. Neither is a choice.
        chosen = st.session_state.get(key, drawn[name][1])
        if drawn[name] == (n, chosen) or drawn[name][0] != n:
            return
        drawn[name] = (n, chosen)
        take(chosen)

    return Bound(key, value, changed)


def select(label: str, options: Sequence[object], field: Bound, **arguments: Any) -> None:
    """Draws a box of choices; a value that is not among `options` shows the first one."""
    index = options.index(field.value) if field.value in options else 0
    st.selectbox(label, options, index, **field.wired, **arguments)


def once_a_press(act: Callable[..., object]) -> Callable[..., None]:
    """`act` as the callback of a button whose second call would do more than the first.

    A browser sends a press shortly after the click. A fragment with `run_every` whose timer fires in between sends the
    press too, so Streamlit calls the callback twice. The call within that fragment's rerun is left out.
    """

    def pressed(*arguments: Any, **named: Any) -> None:
        context = get_script_run_ctx()
        fragments = context.fragment_ids_this_run if context is not None else None
        if not fragments or ThreadState.get().fragment_id in fragments:
            act(*arguments, **named)

    return pressed


def go_to(page: str) -> None:
    """Names the page that `navigation.main` shows next. A callback calls this function: a rerun may be overtaken."""
    st.session_state[GO_TO] = page


@contextmanager
def whole() -> Iterator[None]:
    """A context in which Streamlit does not end the rerun for a newer one: what it takes over is taken over whole."""
    token = _is_whole.set(True)
    try:
        yield
    finally:
        _is_whole.reset(token)


def mend_reruns() -> None:
    """Makes Streamlit end an overtaken rerun after its callbacks and outside `whole`, and ignore timers of a left page.

    Streamlit ends a rerun at its next st call, also before and within a callback. A press would be lost, or half of
    its changes: the browser sends a press once. A fragment's timer fires on the old page until the browser has the new
    one. The request would take the place of the switch, or leave the new page blank. A request that comes while a
    runner ends waits for its end: a new runner would drop what the old one drew last, and nothing would draw it again.
    """
    end, accept = ScriptRunner._maybe_handle_execution_control_request, ScriptRequests.request_rerun
    create = AppSession._create_scriptrunner

    def end_later(runner: ScriptRunner) -> None:
        context = get_script_run_ctx(suppress_warning=True)
        if context is None or (context.has_script_started and not _is_whole.get()):
            end(runner)

    def accept_of_page(requests: ScriptRequests, data: RerunData) -> bool:
        page = requests._rerun_data.page_script_hash  # of the request that waits or runs
        is_of_left_page = data.fragment_id and page and data.page_script_hash != page
        return True if is_of_left_page else accept(requests, data)

    def create_after_end(session: AppSession, data: RerunData) -> None:
        ending = session._scriptrunner
        if session._state is AppSessionState.SHUTDOWN_REQUESTED:
            return
        if ending is None:
            create(session, data)
        elif not ending.request_rerun(data):  # a request that came later has a new runner, which takes this one too
            session._event_loop.call_later(RETRY_S, create_after_end, session, data)

    if end.__name__ != end_later.__name__:
        ScriptRunner._maybe_handle_execution_control_request = end_later  # type: ignore[method-assign, assignment]
        ScriptRequests.request_rerun = accept_of_page  # type: ignore[method-assign, assignment]
        AppSession._create_scriptrunner = create_after_end  # type: ignore[method-assign, assignment]
