"""Tree of the nodes to draw: the module tree, with runs of equal siblings folded into one node.

blocks (ModuleList)            every child is equal:   `blocks` itself is the run, x12
  blocks.0 ... blocks.11
stages (Sequential)            some children are:      a node, `×stages.1`, holds the run
  stages.0
  ×stages.1  ->  stages.1 ... stages.4
net (a class)                  equal attributes, more than FEW_NAMED: a node of their own
  ×net.layer0  ->  net.layer0 ... net.layer9
"""

from __future__ import annotations

from itertools import groupby

from explorer.record.base import Record
from explorer.record.graph import Block, ModelGraph

RUN = "×"
"""First character of the id of a node for a run of blocks."""
FEW = 8
"""Equal children of the model itself up to which they stand side by side."""
FEW_NAMED = 3
"""Equal attributes of a block up to which they stand side by side."""
CONTAINERS = ("ModuleList", "Sequential", "ModuleDict")
OPEN_SHARE = 0.4
"""Share of all saved bytes above which a container is open at first, so that large blocks are in view."""


class Node(Record):
    """A node of the drawing: a block, or a run of equal blocks."""

    id: str
    """The block's fqn, or RUN and the first member's fqn."""
    name: str
    kind: str
    parent: str | None
    children: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    """fqns of the equal blocks in the run; empty if the node is no run."""
    toggles: bool = False
    """Whether recompute can be chosen for it: it is a module, it is called, and it is not the whole model."""


def nest(graph: ModelGraph) -> dict[str, Node]:
    """Every node by id, the model itself (the empty string) first, parents before children."""
    nodes: dict[str, Node] | None = graph.__dict__.get("nest")  # as a cached property: each click asks
    if nodes is None:
        _grow(graph, "", None, nodes := {})
        graph.__dict__["nest"] = nodes
    return nodes


def _grow(graph: ModelGraph, fqn: str, parent: str | None, nodes: dict[str, Node]) -> None:
    block = graph.by_fqn[fqn]
    children = graph.children[fqn]
    groups = [tuple(run) for _, run in groupby(children, key=lambda child: child.repeat_of or child.fqn)]
    is_list = block.kind in CONTAINERS or all(child.name.isdigit() for child in children)
    runs: list[tuple[Block, ...]] = []
    for group in groups:
        runs += [group] if is_list or len(group) > FEW_NAMED else zip(group)
    # The model itself has no box that could hold a folded run of all its children; a block has its own decision.
    whole = len(runs) == 1 and len(runs[0]) > 1 and (is_list if fqn else len(children) <= FEW)
    below = tuple(child.fqn for child in children) if whole else tuple(_id(run) for run in runs)
    nodes[fqn] = Node(
        id=fqn,
        name=_name(block),
        kind=block.kind,
        parent=parent,
        children=below,
        members=tuple(child.fqn for child in children) if whole else (),
        toggles=bool(fqn) and block.n_calls > 0,
    )
    for run in runs:
        holder = fqn
        if len(run) > 1 and not whole:
            holder = _id(run)
            members = tuple(child.fqn for child in run)
            nodes[holder] = Node(
                id=holder,
                name=f"{_name(run[0])} to {_name(run[-1])}",
                kind=run[0].kind,
                parent=fqn,
                children=members,
                members=members,
            )
        for child in run:
            _grow(graph, child.fqn, holder, nodes)


def _id(run: tuple[Block, ...]) -> str:
    return run[0].fqn if len(run) == 1 else RUN + run[0].fqn


def _name(block: Block) -> str:
    """The last part of the path; a number gets its container's name as a prefix."""
    return ".".join(block.fqn.rsplit(".", 2)[-2:]) if block.name.isdigit() else block.name


def default_open(graph: ModelGraph, *, runs: bool = False) -> tuple[str, ...]:
    """Containers to open on the first visit: those with a large share of the saved bytes. Runs stay folded, or not."""
    total = max((block.saved_bytes for block in graph.blocks), default=0)
    nodes = nest(graph)
    opened = []
    for node in nodes.values():
        visible = node.parent is None or node.parent == "" or node.parent in opened
        big = node.id in graph.by_fqn and graph.by_fqn[node.id].saved_bytes > OPEN_SHARE * total
        if node.id and visible and big and node.children and (runs or not node.members):
            opened.append(node.id)
    return tuple(opened)


def ancestors(graph: ModelGraph, fqn: str) -> tuple[str, ...]:
    """Ids that have to be open so that `fqn` is in view."""
    nodes = nest(graph)
    holders: list[str] = []
    parent = nodes[fqn].parent if fqn in nodes else None
    while parent:
        holders.append(parent)
        parent = nodes[parent].parent
    return tuple(reversed(holders))
