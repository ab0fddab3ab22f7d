"""A drawing of the autograd graph, as DOT text that the browser lays out."""

from __future__ import annotations

from explorer.record.base import Record


class AutogradPicture(Record):
    """One graph of grad_fn nodes."""

    dot: str
    n_nodes: int
    n_saved_tensors: int
    saved_bytes: int


class AutogradPictures(Record):
    """The same block kept and recomputed."""

    block: str
    kept: AutogradPicture
    recomputed: AutogradPicture
