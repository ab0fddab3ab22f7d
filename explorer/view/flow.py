"""What flows between the boxes in view, and in which order they stand: edges lifted to siblings, then ranked."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from explorer.record.graph import ModelGraph
from explorer.view.nesting import Node


def _path(id: str, nodes: dict[str, Node]) -> list[str]:
    """From the model down to `id`."""
    path = [id]
    while (parent := nodes[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def siblings(source: str, target: str, nodes: dict[str, Node]) -> tuple[str, str] | None:
    """The two children of the nearest common parent that hold both ends; None where one end holds the other."""
    if source not in nodes or target not in nodes:
        return None
    for a, b in zip(_path(source, nodes), _path(target, nodes)):
        if a != b:
            return a, b
    return None


def flows(graph: ModelGraph, nodes: dict[str, Node], opened: set[str]) -> dict[str, dict[tuple[str, str], int]]:
    """For each open container, the bytes between its children.

    What passes through operations of the container itself (a residual addition) joins the nearest child that feeds
    them, in module order, with each child they feed.
    """
    found: dict[str, dict[tuple[str, str], int]] = {}
    into: dict[str, list[str]] = {}
    out_of: dict[str, list[tuple[str, int]]] = {}
    for edge in graph.edges:
        if edge.source not in nodes or edge.target not in nodes or edge.source == edge.target:
            continue
        source, target = _path(edge.source, nodes), _path(edge.target, nodes)
        level = next((i for i, (a, b) in enumerate(zip(source, target)) if a != b), None)
        if level is not None:
            pair = (source[level], target[level])
            pairs = found.setdefault(source[level - 1], {})
            pairs[pair] = pairs.get(pair, 0) + edge.n_bytes
        elif len(source) > len(target):
            into.setdefault(edge.target, []).append(source[len(target)])
        else:
            out_of.setdefault(edge.source, []).append((target[len(source)], edge.n_bytes))
    for parent, fed in out_of.items():
        place = {id: i for i, id in enumerate(nodes[parent].children)}
        for target_id, n_bytes in fed:
            before = [id for id in into.get(parent, ()) if id in place and place[id] < place[target_id]]
            if before:
                pair = (max(before, key=lambda id: place[id]), target_id)
                pairs = found.setdefault(parent, {})
                pairs[pair] = max(pairs.get(pair, 0), n_bytes)
    return {parent: pairs for parent, pairs in found.items() if parent in opened}


def ranked(children: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Kahn's order; module order breaks ties, and in a cycle the first that is left goes next."""
    place = {id: i for i, id in enumerate(children)}
    after: dict[str, list[str]] = {id: [] for id in children}
    waiting = dict.fromkeys(children, 0)
    for a, b in pairs:
        after[a].append(b)
        waiting[b] += 1
    ready = [place[id] for id in children if not waiting[id]]
    heapq.heapify(ready)
    order: list[str] = []
    left = dict.fromkeys(children)
    while left:
        id = children[heapq.heappop(ready)] if ready else next(iter(left))
        if id not in left:
            continue
        del left[id]
        order.append(id)
        for follower in after[id]:
            waiting[follower] -= 1
            if not waiting[follower] and follower in left:
                heapq.heappush(ready, place[follower])
    return order
