"""The drawing of the block graph as graph.js takes it: rows, arrows, cuts and labels in short lists.

Two pages draw with graph.js: the app, where a server answers clicks, and a report, where a script of the page does.
At the end: the autograd pictures of torchviz, which a browser draws from DOT text, in the colours of the page.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from explorer.record.base import Record, to_plain
from explorer.record.graph import AutogradPicture, AutogradPictures
from explorer.view.drawing.colours import DARK_PAGE, LIGHT_PAGE, RECOMPUTE, STAGE_COLOURS
from explorer.view.drawing.units import count, mib
from explorer.view.graph.geometry import BlockRow, Layout, Link, Window
from explorer.view.graph.labels import Label
from explorer.view.graph.nesting import RUN

HERE = Path(__file__).parent
COLOURS = {"recompute": RECOMPUTE, "stages": list(STAGE_COLOURS)}
MOST_LINES = 3
"""Largest number of lines side by side, a line per tensor between two boxes."""
MANY = 9
"""Number of tensors from which one line is drawn: the tensors of a loop, not the skips of a model."""


class Paint(Record):
    """Parts of the drawing that change without moving a box."""

    labels: Mapping[str, Label]
    segments: tuple[tuple[str, ...], ...] = ()
    """Blocks that are recomputed together."""
    actions: Mapping[str, str] = {}
    """The word on a block whose action is not plain recompute."""
    height: int = 520
    """Pixels from which the graph scrolls."""
    window: Window | None = None
    """The window that the page is laid out for; None: it does not matter."""
    jump: tuple[str, int] | None = None
    """Node to scroll to, and how many jumps there were: a new number scrolls."""


def script() -> str:
    """Source text of graph.js."""
    return (HERE / "graph.js").read_text(encoding="utf-8")


def as_function(module: str) -> str:
    """The exported function of `module`, the source text of a module, as an expression."""
    return f"(() => {{\n{module.replace('export default function', 'return function', 1)}\n}})()"


def style() -> str:
    """Source text of graph.css."""
    return (HERE / "graph.css").read_text(encoding="utf-8")


def painted(drawing: Layout, paint: Paint) -> dict[str, object]:
    """Data for the browser, without the marks: short rows, and labels of the rows in view."""
    return words(drawing, paint) | {
        "geometry": geometry(drawing),
        "shape": drawing.shape,
        "colours": COLOURS,
        "jump": {"id": paint.jump[0], "n": paint.jump[1]} if paint.jump else None,
        "height": paint.height,
        "window": to_plain(paint.window) if paint.window else None,
    }


def words(drawing: Layout, paint: Paint) -> dict[str, object]:
    """What a click changes: labels of the rows in view, segments and actions."""
    in_view = {row.id for row in drawing.rows}
    return {
        "labels": {id: short_label(label) for id, label in paint.labels.items() if id in in_view},
        "segments": paint.segments,
        "actions": paint.actions,
    }


def geometry(drawing: Layout) -> dict[str, object]:
    """Places of rows, joins, arrows and cuts."""
    groups = {row.id for row in drawing.rows if row.foldable and not row.open}
    beside = {end for link in drawing.links if link.kind != "next" for end in (link.source, link.target)}
    return {
        "height": drawing.height,
        "rows": [_row(row) for row in drawing.rows],
        "joins": [
            [mark.id, mark.sign, mark.top, mark.height, mark.left, mark.right, mark.id in beside]
            for mark in drawing.joins
        ],
        "links": [
            [link.kind, link.start, link.end, link.lane, link.source_right, link.target_right,
             _n_lines(link, groups), _flows(link)]
            for link in drawing.links
        ],
        "cuts": [
            [cut.id, cut.top, cut.left, cut.right,
             cut.refusal or cut.note or f"cut: {mib(cut.n_bytes)} would cross", bool(cut.refusal)]
            for cut in drawing.cuts
        ],
    }  # fmt: skip


def _row(row: BlockRow) -> list[object]:
    flags = row.toggles | row.foldable << 1 | row.open << 2
    place = [row.depth, row.top, row.height, row.left, row.right]
    return [row.id, row.name, row.kind, *place, flags, list(row.members), row.n_calls, row.n_inside]


def short_label(label: Label) -> list[object]:
    """Bytes, note, badges, title, heat, stage, bar."""
    badges = [[badge.sign, badge.severity, badge.text] for badge in label.badges]
    return [label.bytes, label.note, badges, label.title, round(label.heat, 3), label.stage, label.bar]


def _n_lines(link: Link, groups: Collection[str]) -> int:
    """Several from one folded group to another, where they are tensors of the model and not of a loop."""
    between_groups = link.source in groups and link.target in groups
    return min(link.n_tensors, MOST_LINES) if between_groups and link.n_tensors < MANY else 1


def _flows(link: Link) -> str:
    tensors = f"{link.n_tensors} tensors, " if link.n_tensors > 1 else ""
    again = ", for the next call" if link.kind == "back" else ""
    return f"{tensors}{mib(link.n_bytes)} {_said(link.source)} → {_said(link.target)}{again}"


def _said(id: str) -> str:
    """A box by its path, a join by its block and operator."""
    return id.lstrip(RUN).removeprefix(":")


_HEAD = re.compile(r"^(\s*(?:strict\s+)?digraph[^{]*\{)", re.MULTILINE)
_FILLS = {
    "lightblue": ("#CFE3F7", "#1B4B7A"),
    "orange": ("#FBD9BC", "#7A3A08"),
    "darkolivegreen1": ("#CDEBD8", "#14563A"),
    "darkolivegreen3": ("#A9DBBF", "#1A6B48"),
    "lightgrey": ("#E3E5E8", "#343A44"),
}
"""torchviz's fills: pale fills for the light page, deep fills for the dark page."""


def themed(dot: str, *, dark: bool) -> str:
    """`dot` with a transparent ground, text and lines that contrast with the page, and softened fills."""
    text, line = ("#FAFAFA", "#9AA3AF") if dark else ("#1F2430", "#5A6270")
    page = DARK_PAGE if dark else LIGHT_PAGE
    head = (
        f'\\1\n\tbgcolor="transparent"\n\tnode [color="{line}" fontcolor="{text}" fillcolor="{page}"'
        f' fontname="sans-serif"]\n\tedge [color="{line}"]\n'
    )
    for name, fills in _FILLS.items():
        dot = re.sub(rf'\bfillcolor="?{name}"?(?![\w])', f'fillcolor="{fills[int(dark)]}"', dot)
    return _HEAD.sub(head, dot, count=1)


def caption(picture: AutogradPicture) -> str:
    """Numbers of nodes and saved tensors in the picture, and the saved bytes."""
    tensors = count(picture.n_saved_tensors, "saved tensor")
    return f"{count(picture.n_nodes, 'node')}, {tensors}, {mib(picture.saved_bytes)}"


def difference(pictures: AutogradPictures) -> str:
    """A sentence on the changes that recomputing made in the graph, with the record's figures."""
    plain, again = pictures.kept, pictures.recomputed
    nodes = f"{count(plain.n_nodes, 'node')} became {again.n_nodes:,}"
    if again.n_nodes == plain.n_nodes:
        nodes = f"The {count(plain.n_nodes, 'node')} stay"
    tensors = count(again.n_saved_tensors, "saved tensor")
    return (
        f"{nodes}; recomputed they hold {tensors} ({mib(again.saved_bytes)}) instead of "
        f"{plain.n_saved_tensors:,} ({mib(plain.saved_bytes)})."
    )
