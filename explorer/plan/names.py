"""Names of blocks and operators: which lies in which, and how a sentence lists many of them.

`decoder.layers.3` lies in `decoder.layers`, in `decoder`, and in the model itself, whose name is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Fqns = tuple[str, ...]
"""Blocks by name: those of one unit, of a stage, of a list of layers."""


def is_within(fqn: str, block: str) -> bool:
    """Whether `fqn` is `block` or lies below it."""
    return not block or fqn == block or fqn.startswith(f"{block}.")


def above(fqn: str) -> Iterator[str]:
    """Every block that holds `fqn`, the nearest first; the model itself comes last."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def lineage(fqn: str) -> Iterator[str]:
    """`fqn` and every block that holds it, the nearest first."""
    yield fqn
    yield from above(fqn)


def innermost(fqns: Iterable[str]) -> tuple[str, ...]:
    """Those without another of them below."""
    named = tuple(fqns)
    holders = {fqn for one in named for fqn in above(one)}
    return tuple(fqn for fqn in named if fqn not in holders)


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
