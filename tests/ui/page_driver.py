"""What a person does on the Explore page and on the Runs page, in the words that AppTest understands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from explorer.jobs.store import Store
from explorer.record import ModelRef, Policy, RunSpec
from tests import graphs

App = Callable[..., AppTest]
ROOT = Path(__file__).resolve().parents[2]
GRAPH = graphs.gpt(6)
ALL = tuple(f"blocks.{i}" for i in range(6))
SPEC = RunSpec(model=ModelRef(target="sample_models/gpt.py", size="small"), policy=Policy.recompute(ALL))
WINDOW = {"height": 800, "narrow": False}
"""What a graph in a laptop's window says once it stands; AppTest has no browser that would."""


def settle(at: AppTest, page: str = "explore") -> AppTest:
    """Runs until what the worker has finished was taken over by `page`, as the page's timer does."""
    for _ in range(8):
        assert not at.exception, at.exception[0].message
        if at.session_state[page].job.id is None:
            return at
        at.run()
    raise AssertionError("the worker has not finished")


def graph_data(at: AppTest) -> dict[str, Any]:
    """What the block graph was given."""
    return next(data for data in component_data(at) if "geometry" in data)


def component_data(at: AppTest) -> list[dict[str, Any]]:
    """What the components of our own were given: the graph, its tools, the slider."""
    return [json.loads(component.proto.json)[0] for component in at.get("bidi_component")]


def tools(at: AppTest) -> dict[str, Any]:
    """What the tools of the graph were given; empty without tools."""
    return next((data for data in component_data(at) if "presets" in data), {})


def drawn_before_plotly(at: AppTest) -> str:
    """The sketch that stands in a chart's place until the browser has its library; empty without one."""
    return "".join(data.get("drawing", "") for data in component_data(at))


def steps(at: AppTest, *chosen: dict[str, Any], n_before_press: int = 0) -> dict[str, Any]:
    """What the browser tells after these steps, each a kind and what it is about.

    With `n_before_press` something outside was pressed behind so many of them.
    """
    taken = graph_data(at)["taken"]
    listed = [{"n": taken + i, **step} for i, step in enumerate(chosen, 1)]
    return {"steps": {"list": listed, "press": taken + n_before_press}}


def message(at: AppTest, *, pressed: bool = False, **marks: Any) -> dict[str, Any]:
    """A click in the graph, as the browser tells it, after which these are the marks.

    With `pressed` something outside the graph was pressed behind the click; else the click came last.
    """
    data, selected = graph_data(at), marks.pop("selected", None)
    chosen = [{"kind": name, "ids": sorted({*data[name]} ^ {*ids})} for name, ids in marks.items()]
    if selected is not None:
        chosen.append({"kind": "select", "ids": [selected]})
    return steps(at, *chosen, n_before_press=len(chosen) if pressed else 0)


def say(at: AppTest, **marks: Any) -> AppTest:
    """A click in the graph, and what the page answers."""
    return take(at, *message(at, **marks)["steps"]["list"])


def take(at: AppTest, *chosen: dict[str, Any]) -> AppTest:
    """Steps of a person, and what the page answers."""
    at.session_state[at.session_state["draft"].widget] = steps(at, *chosen)
    at.run()
    assert not at.exception, at.exception[0].message
    return at


def figures(at: AppTest) -> dict[str, str]:
    """The headline strip: label and value."""
    return {cell["label"]: cell["value"] for cell in strip_cells(at)}


def strip_cells(at: AppTest) -> list[dict[str, str]]:
    """The figures of the headline strip, in order."""
    return next((data["cells"] for data in component_data(at) if "cells" in data), [])


def texts(at: AppTest) -> str:
    """Everything written on the page in words, as a reader sees it: without the signs that escape Markdown."""
    drawn = [str(element.value) for element in (*at.text, *at.markdown, *at.caption, *at.warning, *at.error)]
    return "\n".join([*drawn, *(" ".join(cell.values()) for cell in strip_cells(at))]).replace("\\", "")


def address(at: AppTest) -> dict[str, str]:
    """What stands in the address bar, to be visited again."""
    return {name: value[0] if isinstance(value, list) else value for name, value in at.query_params.items()}


def widget(at: AppTest, kind: str, name: str) -> Any:
    """The widget that shows the record's `name` now: ui/session/values.py puts another in its place when it must."""
    (shown,) = [one for one in getattr(at, kind) if one.key and one.key.partition("~")[0] == name]
    return shown


def spec(at: AppTest) -> RunSpec:
    """The drawn run."""
    drawn: RunSpec = at.session_state["draft"].spec
    return drawn


def press(at: AppTest, key: str) -> AppTest:
    if key in ("undo", "redo"):
        assert tools(at)[key], f"there is nothing to {key}"
        return settle(take(at, {"kind": key}))
    return settle(at.button(key=key).click().run())


def open_tab(at: AppTest, name: str) -> AppTest:
    at.session_state["tabs"] = name
    return settle(at.run())


def upload(at: AppTest, data: bytes | str, name: str = "policy.yaml") -> AppTest:
    """Opens a policy file."""
    at.file_uploader(key="upload_policy").upload(name, data.encode() if isinstance(data, str) else data)
    return settle(at.run())


def at_address(at: AppTest, query: dict[str, str]) -> AppTest:
    """`at` before its first run, in a laptop's window."""
    at.session_state["window"], at.session_state["plotly"] = WINDOW, True
    for name, value in query.items():
        at.query_params[name] = value
    return at


def start_only(**query: str) -> AppTest:
    """A new visitor, while a run is under way."""
    return at_address(AppTest.from_file(str(ROOT / "app.py"), default_timeout=60), query).run()


def slider(at: AppTest) -> list[str]:
    """Labels of the slider over the cheapest plans; empty before it stands."""
    return next((data["labels"] for data in component_data(at) if "at" in data), [])


def slide(at: AppTest, position: int) -> AppTest:
    """A move of the slider, and what the page answers."""
    version = next(data["version"] for data in component_data(at) if "version" in data)
    return settle(take(at, {"kind": "place", "place": position, "version": version}))


def select(at: AppTest, *rows: int) -> AppTest:
    """Ticks these rows of the list of runs."""
    if rows:
        table = f"runs_{at.session_state['runs'].order}"
        at.session_state[table] = {"selection": {"rows": list(rows), "columns": [], "cells": []}}
        at.run()
        assert not at.exception, at.exception[0].message
    return at


def saved(store: Store, name: str = "mine") -> str:
    """Id of a stored comparison."""
    return store.save(graphs.compared(GRAPH, SPEC), name)
