"""A chart is a value: its picture, its words for who cannot see it, and the same numbers as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a function of this ring gives to whoever draws it."""

    name: str
    """What its table and its files are called: `memory timeline`."""
    figure: go.Figure
    alt: str
    """The picture in a sentence. No two charts share one: a screen reader tells them apart by it."""
    rows: Callable[[], Rows]
    """The twin of the picture, made when somebody unfolds it."""
