"""A visit of the Explore page: its spec, its buttons, and a visitor who comes while something runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streamlit.testing.v1 import AppTest

from explorer.record import RunSpec
from tests.ui.page_driver import settle

App = Callable[..., AppTest]


ROOT = Path(__file__).resolve().parents[3]


ALL = [f"blocks.{i}" for i in range(6)]


def spec(at: AppTest) -> RunSpec:
    return at.session_state["draft"].spec


def start_only(**query: str) -> AppTest:
    """A new visitor, while a run is under way."""
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    for name, value in query.items():
        at.query_params[name] = value
    return at.run()


def press(at: AppTest, key: str) -> AppTest:
    return settle(at.button(key=key).click().run())


def in_session(at: AppTest, act: Callable[[], object]) -> object:
    """Calls `act` as a callback of the page would be: the worker and store of this app are patched already."""
    return act()
