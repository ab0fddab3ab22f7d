"""The block graph as DOT text and as SVG, for use outside the app. The page has another drawing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import graphviz

from explorer.errors import NotOnThisDevice
from explorer.record.graph import AutogradPicture, AutogradPictures, ModelGraph
from explorer.view.drawing.colours import DARK_PAGE, LIGHT_PAGE
from explorer.view.drawing.units import count, mib
from explorer.view.graph.geometry import BlockRow, JoinMark, Layout, Link, layout
from explorer.view.graph.nesting import default_open


def graph_dot(graph: ModelGraph, opened: Collection[str] | None = None) -> str:
    """DOT: open containers are clusters, runs of equal blocks one node, edges carry the bytes that flow."""
    drawing = layout(graph, default_open(graph) if opened is None else opened)
    lines = [
        "digraph model {",
        "  rankdir=TB",
        '  node [shape=box style=rounded fontname="Helvetica"] edge [fontname="Helvetica" fontsize=9]',
        *_boxes(drawing, graph),
        *map(_arrow, drawing.links),
        "}",
    ]
    return "\n".join(lines) + "\n"


def graph_svg(graph: ModelGraph) -> str:
    """SVG, laid out by Graphviz. Raises NotOnThisDevice if Graphviz's `dot` program is not installed."""
    try:
        return str(graphviz.Source(graph_dot(graph)).pipe(format="svg", encoding="utf-8"))
    except graphviz.ExecutableNotFound as error:
        raise NotOnThisDevice(
            "SVG needs Graphviz's program `dot`, which is not installed here.",
            hint="Install it (apt-get install graphviz, brew install graphviz), or take --format dot.",
        ) from error


def _boxes(drawing: Layout, graph: ModelGraph) -> Iterator[str]:
    """Rows come parents first; a row of smaller depth closes the clusters opened since."""
    open_depths: list[int] = []
    ends = {end for link in drawing.links for end in (link.source, link.target)}
    yield from (f"  {_join(mark)}" for mark in drawing.joins if not mark.block)
    for row in drawing.rows:
        while open_depths and row.depth <= open_depths[-1]:
            open_depths.pop()
            yield "  " * (len(open_depths) + 1) + "}"
        indent = "  " * (len(open_depths) + 1)
        if row.open:
            yield f"{indent}subgraph {_quoted('cluster ' + row.id)} {{ label={_quoted(f'{row.name} ({row.kind})')}"
            open_depths.append(row.depth)
            yield from (f"{indent}  {_join(mark)}" for mark in drawing.joins if mark.block == row.id)
            if row.id in ends:  # DOT joins nodes, not clusters: the block's own doing is a point within
                yield f'{indent}  {_quoted(row.id)} [label="" shape=point]'
        else:
            yield f"{indent}{_quoted(row.id)} [label={_quoted(_label(row, graph))}]"
    while open_depths:
        open_depths.pop()
        yield "  " * (len(open_depths) + 1) + "}"


def _label(row: BlockRow, graph: ModelGraph) -> str:
    fqns = row.members or (row.id,)
    saved = sum(graph.by_fqn[fqn].saved_bytes for fqn in fqns)
    times = f" ×{len(row.members)}" if row.members else ""
    times += f", called {row.n_calls}×" if row.n_calls > 1 else ""
    return f"{row.name}{times}\n{row.kind}\nsaves {mib(saved)}"


def _join(mark: JoinMark) -> str:
    return f"{_quoted(mark.id)} [label={_quoted(mark.sign)} shape=circle margin=0.02]"


def _arrow(link: Link) -> str:
    return f"  {_quoted(link.source)} -> {_quoted(link.target)} [label={_quoted(mib(link.n_bytes))}]"


def _quoted(text: str) -> str:
    """A quoted DOT string; names come from strangers.

    graphviz.Digraph does not serve: it reads text after a colon in an edge's end as a port, and ids of joins have
    colons. It also passes a label in angle brackets on as HTML.
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", " ")
    return f'"{escaped}"'


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
