"""A million points drawn as two thousand, the exact peak among them.

Each bucket keeps its lowest and its highest point (min-max). Methods that pick one point a bucket by area (LTTB) draw
a nicer line and lose the peak, which is the one number a memory chart is read for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.intp]

MAX_POINTS = 2000
"""Points per drawn trace: what a browser redraws at once."""


def minmax(values: NDArray[Any], n_points: int = MAX_POINTS) -> Indices:
    """Ascending indices of at most `n_points` of `values`: first, last, and the extremes of each bucket.

    Among equal values the first of a bucket is kept, so the first tick of the peak survives.

    >>> minmax(np.array([0, 9, 0, 0, 0, 0, 7, 0]), 6).tolist()
    [0, 1, 2, 4, 6, 7]
    """
    if n_points < 4:
        raise ValueError(f"a thinned line needs 4 points or more, got {n_points}")
    n = len(values)
    if n <= n_points:
        return np.arange(n)
    n_buckets = (n_points - 2) // 2
    edges = np.linspace(0, n, n_buckets + 1).astype(np.intp)
    width = int(np.diff(edges).max())
    # Equal rows: a short bucket repeats its last point, which moves neither its extremes nor their first place.
    grid = np.minimum(edges[:-1, None] + np.arange(width), edges[1:, None] - 1)
    rows = values[grid]
    here = np.arange(n_buckets)
    lowest = grid[here, rows.argmin(axis=1)]
    highest = grid[here, rows.argmax(axis=1)]
    return np.unique(np.concatenate([[0], lowest, highest, [n - 1]]))


def with_points(indices: Indices, extra: Iterable[int], n: int) -> Indices:
    """`indices` and those of `extra` that lie in 0..n-1, ascending, each once."""
    wanted = np.fromiter((i for i in extra if 0 <= i < n), dtype=np.intp)
    return np.union1d(indices, wanted)
