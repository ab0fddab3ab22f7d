"""The block graph as DOT text and as SVG, for people who take it elsewhere. The page draws its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import graphviz

from explorer.errors import NotOnThisDevice
from explorer.record.graph import ModelGraph
from explorer.view.geometry import Link, Row, layout
from explorer.view.nesting import default_open
from explorer.view.units import mib


def graph_dot(graph: ModelGraph, opened: Collection[str] | None = None) -> str:
    """DOT: open containers are clusters, runs of equal blocks one node, edges carry the bytes that flow."""
    drawing = layout(graph, default_open(graph) if opened is None else opened)
    lines = [
        "digraph model {",
        "  compound=true rankdir=TB",
        '  node [shape=box style=rounded fontname="Helvetica"] edge [fontname="Helvetica" fontsize=9]',
        *_boxes(drawing.rows, graph),
        *(_arrow(link, drawing.rows) for link in drawing.links),
        "}",
    ]
    return "\n".join(lines) + "\n"


def graph_svg(graph: ModelGraph, opened: Collection[str] | None = None) -> str:
    """SVG, laid out by Graphviz. Raises NotOnThisDevice where its `dot` program is not installed."""
    try:
        return str(graphviz.Source(graph_dot(graph, opened)).pipe(format="svg", encoding="utf-8"))
    except graphviz.ExecutableNotFound as error:
        raise NotOnThisDevice(
            "SVG needs Graphviz's program `dot`, which is not installed here.",
            hint="Install it (apt-get install graphviz, brew install graphviz), or take --format dot.",
        ) from error


def _boxes(rows: tuple[Row, ...], graph: ModelGraph) -> Iterator[str]:
    """Rows come parents first; a row of smaller depth closes the clusters opened since."""
    open_depths: list[int] = []
    for row in rows:
        while open_depths and row.depth <= open_depths[-1]:
            open_depths.pop()
            yield "  " * (len(open_depths) + 1) + "}"
        indent = "  " * (len(open_depths) + 1)
        if row.open:
            yield f"{indent}subgraph {_quoted('cluster ' + row.id)} {{ label={_quoted(f'{row.name} ({row.kind})')}"
            open_depths.append(row.depth)
        else:
            yield f"{indent}{_quoted(row.id)} [label={_quoted(_label(row, graph))}]"
    while open_depths:
        open_depths.pop()
        yield "  " * (len(open_depths) + 1) + "}"


def _label(row: Row, graph: ModelGraph) -> str:
    fqns = row.members or (row.id,)
    saved = sum(graph.by_fqn[fqn].saved_bytes for fqn in fqns)
    times = f" ×{len(row.members)}" if row.members else ""
    return f"{row.name}{times}\n{row.kind}\nsaves {mib(saved)}"


def _arrow(link: Link, rows: tuple[Row, ...]) -> str:
    """DOT joins nodes, not clusters: an arrow to a cluster ends at a node inside and is cut off at its border."""
    source, tail = _inside(link.source, rows, last=True)
    target, head = _inside(link.target, rows, last=False)
    ends = [f"label={_quoted(mib(link.n_bytes))}"]
    ends += [f"ltail={_quoted('cluster ' + link.source)}"] if tail else []
    ends += [f"lhead={_quoted('cluster ' + link.target)}"] if head else []
    return f"  {_quoted(source)} -> {_quoted(target)} [{' '.join(ends)}]"


def _inside(id: str, rows: tuple[Row, ...], *, last: bool) -> tuple[str, bool]:
    """A closed row in or at `id`, and whether it lies within."""
    at = next(i for i, row in enumerate(rows) if row.id == id)
    if not rows[at].open:
        return id, False
    below: list[str] = []
    for row in rows[at + 1 :]:
        if row.depth <= rows[at].depth:
            break
        if not row.open:
            below.append(row.id)
    return below[-1 if last else 0], True


def _quoted(text: str) -> str:
    """A DOT string; names come from strangers."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", " ")
    return f'"{escaped}"'
