"""The autograd pictures of torchviz: DOT text in the colours of the page, and their figures in words."""

from __future__ import annotations

import re

from explorer.record.graph import AutogradPicture, AutogradPictures
from explorer.view.drawing.colours import DARK_PAGE, LIGHT_PAGE
from explorer.view.drawing.units import count, mib

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
    nodes = (
        f"The {count(plain.n_nodes, 'node')} stay"
        if again.n_nodes == plain.n_nodes
        else f"{count(plain.n_nodes, 'node')} became {again.n_nodes:,}"
    )
    tensors = count(again.n_saved_tensors, "saved tensor")
    return (
        f"{nodes}; recomputed they hold {tensors} ({mib(again.saved_bytes)}) instead of "
        f"{plain.n_saved_tensors:,} ({mib(plain.saved_bytes)})."
    )
