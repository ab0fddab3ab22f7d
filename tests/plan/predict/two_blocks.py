"""A measured step of two blocks, entry by entry."""

from __future__ import annotations

import msgspec

from explorer.record import Measurement
from tests.view.builders import MIB, Book, measured


def two_blocks() -> Measurement:
    """Blocks a and b are given x (1 MiB) and each make, in this order:

    h  8 MiB by mm, saved      t  4 MiB by sin, gone when the block returns      s  2 MiB by exp, saved
    y  1 MiB by add, handed on and saved by whoever is given it
    """
    book = Book()
    book.phase("forward")
    given = book.alloc("saved activation", "", MIB, "aten.embedding.default")
    saved: dict[str, list[int]] = {}
    for name in "ab":
        first = book.tick
        h = book.alloc("saved activation", name, 8 * MIB, "aten.mm.default")
        t = book.alloc("temporary", name, 4 * MIB, "aten.sin.default")
        s = book.alloc("saved activation", name, 2 * MIB, "aten.exp.default")
        y = book.alloc("saved activation", name, MIB, "aten.add.Tensor")
        book.free(t)
        book.calls.append((name, first, book.tick, (given,), (y,)))
        saved[name] = [h, s, given]
        given = y
    book.phase("backward")
    gradient = book.alloc("temporary", "", MIB, "aten.ones_like.default")
    book.free(given)
    for name in "ba":
        h, s, x = saved[name]
        inner = book.alloc("temporary", name, 2 * MIB, "aten.mul.Tensor")
        book.free(s)
        book.free(gradient)
        gradient = book.alloc("temporary", name, MIB, "aten.mm.default")
        book.free(h)
        book.free(x)
        book.free(inner)
    book.free(gradient)
    run = measured()
    return msgspec.structs.replace(run, allocations=book.close(), phases=tuple(book.spans), blocks=())
