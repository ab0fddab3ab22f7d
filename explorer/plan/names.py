"""Names of blocks and operators: which lies in which, how a sentence lists many, and which results a unit may keep.

`decoder.layers.3` lies in `decoder.layers`, in `decoder`, and in the model itself, whose name is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit
from explorer.record.policy import outermost as outermost

Fqns = tuple[str, ...]
"""Blocks by name: those of one unit, of a stage, of a list of layers."""


def is_within(fqn: str, *blocks: str) -> bool:
    """True if `fqn` is one of `blocks` or lies below one."""
    return any(not block or fqn == block or fqn.startswith(f"{block}.") for block in blocks)


def overlaps(fqn: str, *blocks: str) -> bool:
    """True if `fqn` is one of `blocks`, lies below one, or holds one."""
    return is_within(fqn, *blocks) or any(is_within(block, fqn) for block in blocks)


def above(*fqns: str) -> Iterator[str]:
    """Every block that holds one of `fqns`, the nearest first; the model itself comes last."""
    for fqn in fqns:
        while fqn:
            fqn = fqn.rpartition(".")[0]
            yield fqn


def lineage(*fqns: str) -> Iterator[str]:
    """`fqns` and every block that holds one, the nearest first."""
    yield from fqns
    yield from above(*fqns)


def nearest_around(fqn: str, blocks: Container[str]) -> str | None:
    """The nearest of `blocks` that is `fqn` or holds it."""
    return next((holder for holder in lineage(fqn) if holder in blocks), None)


def innermost(fqns: Iterable[str]) -> tuple[str, ...]:
    """The names of `fqns` that contain no other name of `fqns`."""
    named = tuple(fqns)
    holders = set(above(*named))
    return tuple(fqn for fqn in named if fqn not in holders)


def share_of_blocks(named: Iterable[str], counted: Collection[str]) -> str:
    """`6 of 12 blocks`: recomputed blocks of the `counted` ones, which the block graph shows as its rows.

    A block that is recomputed in part has its number behind a comma: `6 of 12 blocks, 2 in part`. Named blocks that
    neither are in a counted block nor contain one are `1 more`. Without counted blocks: `6 blocks`.
    """
    chosen = outermost(named)
    within = {fqn for fqn in counted if not set(lineage(fqn)).isdisjoint(chosen)}
    holders = {holder: fqn for fqn in chosen for holder in above(fqn)}
    in_part = [fqn for fqn in counted if fqn in holders and fqn not in within]
    around_counted = set(lineage(*counted))
    others = [fqn for fqn in chosen if fqn not in around_counted and set(above(fqn)).isdisjoint(counted)]
    if not counted:
        return _blocks(len(chosen))
    part = f", {len(in_part)} in part" if in_part else ""
    more = f" and {len(others)} more" if others else ""
    return f"{len(within) + len(in_part)} of {_blocks(len(counted))}{part}{more}"


def recomputed_blocks(policy: Policy) -> list[str]:
    """The outermost blocks that run again under `policy`: an offloaded block does not."""
    return outermost(fqn for unit in policy.units if unit.action != "offload" for fqn in unit.blocks)


def recomputed_share(policy: Policy, counted: Collection[str]) -> str:
    """`6 of 12 blocks`: `share_of_blocks` of the blocks that run again."""
    return share_of_blocks(recomputed_blocks(policy), counted)


def actions_text(policy: Policy, counted: Collection[str]) -> str:
    """`Recompute 1 of 3 blocks, offload 2 of 3 blocks`."""
    offloaded = [fqn for unit in policy.units if unit.action == "offload" for fqn in unit.blocks]
    parts = []
    if recomputed_blocks(policy):
        parts.append(f"recompute {recomputed_share(policy, counted)}")
    if offloaded:
        parts.append(f"offload {share_of_blocks(offloaded, counted)}")
    return ", ".join(parts).capitalize()  # it holds words and numbers alone


def _blocks(n: int) -> str:
    return f"{n:,} block{'s' * (n != 1)}"


def operator_word(name: str) -> str:
    """`mm` of `aten.mm.default`; what is no full name of an operator stays as it is."""
    return name.split(".")[1] if name.count(".") == 2 else name


def listed(names: Sequence[str], n_shown: int = 3, *, between: str = ", ") -> str:
    """`a, b, c and 5 more`"""
    more = f" and {len(names) - n_shown} more" if len(names) > n_shown else ""
    return between.join(names[:n_shown]) + more


def some(fqns: Sequence[str]) -> str:
    """`layers.0, layers.1, layers.2 and 5 more`; the model itself, whose name is empty, is called that."""
    return listed([fqn or "the model" for fqn in fqns])


def in_columns(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The lines of a text table: the names of the columns, then the rows; empty without rows."""
    texts = [[*map(str, row.values())] for row in rows]
    columns = [(name, *cells) for name, *cells in zip(rows[0], *texts)] if rows else []
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*columns)]


def written_results(unit: Unit, graph: ModelGraph | None) -> tuple[str, ...]:
    """Operators of the unit's `save_ops` whose results torch refuses to keep. Their names say that they write into an
    argument, or the observed forward writes into their results later."""
    by_fqn = {} if graph is None else graph.by_fqn
    rewritten = {op for fqn in unit.blocks if fqn in by_fqn for op in by_fqn[fqn].rewritten_ops}
    return tuple(op for op in unit.save_ops if op in rewritten or "_." in f"{op}.")


def products_kept(blocks: tuple[str, ...], graph: ModelGraph) -> Unit:
    """The unit that recomputes `blocks` but keeps results of their matrix products, attentions and convolutions.

    FLOPs are counted for these operators. Results that are written in place are recomputed too. If no operator
    remains, everything is recomputed.
    Source: https://pytorch.org/blog/activation-checkpointing-techniques/ (selective activation checkpointing)
    """
    counted = {op for fqn in blocks for op, flops in graph.by_fqn[fqn].op_flops.items() if flops}
    every = Unit(blocks=blocks, action="save_ops", save_ops=tuple(sorted(counted)))
    products = tuple(op for op in every.save_ops if op not in written_results(every, graph))
    return Unit(blocks=blocks, action="save_ops", save_ops=products) if products else Unit(blocks=blocks)
