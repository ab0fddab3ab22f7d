"""The block graph as DOT text and as SVG, for people who take it elsewhere. The page draws its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import graphviz

from explorer.errors import NotOnThisDevice
from explorer.record.graph import ModelGraph
from explorer.view.drawing.units import mib
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
    """SVG, laid out by Graphviz. Raises NotOnThisDevice where its `dot` program is not installed."""
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
    """A DOT string; names come from strangers.

    Not graphviz.Digraph: it reads what follows a colon in an edge's end as a port, and ids of joins have colons; a
    label in angle brackets it passes on as HTML.
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", " ")
    return f'"{escaped}"'
