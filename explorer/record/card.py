"""A GPU as far as memory goes, and what a step holds there by the rules of torch's CUDA allocator."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from explorer.record.allocations import Phase
from explorer.record.base import Column, Count, Record

FIGURES = ("requested_bytes", "allocated_bytes", "reserved_bytes", "stranded_bytes")
"""Figures of a card in the order in which they are shown."""


class Card(Record):
    """A card, and the settings of torch that decide what an allocator does on it."""

    name: str
    total_bytes: Annotated[int, Meta(ge=2**20, le=2**50)]
    """As torch reports it: `torch.cuda.get_device_properties(0).total_memory`."""
    taken_bytes: Count | None = None
    """What driver and context take once a forward ran; None: not known for this card."""
    taken_in_backward_bytes: Count | None = None
    """What they take from the first backward on; None: as in forward."""
    capability: str = ""
    """Compute capability, such as `9.0`; empty: unknown."""
    multiprocessors: Count | None = None
    """None: unknown."""
    options: str = ""
    """PYTORCH_CUDA_ALLOC_CONF; empty: torch's defaults."""
    cublas: str = ""
    """CUBLAS_WORKSPACE_CONFIG; empty: torch's default for the card."""
    torch: str = ""
    """Version of torch whose rules decide, such as `2.13`; empty: the installed one."""
    n_steps: Annotated[int, Meta(ge=2, le=1000)] = 12
    """Steps that are played at most."""

    @property
    def driver_bytes(self) -> int | None:
        """What driver and context take in a training; None: not known for this card."""
        return self.taken_bytes if self.taken_in_backward_bytes is None else self.taken_in_backward_bytes


class RefusedRequest(Record):
    """The request for which the card has no memory."""

    n_bytes: Count
    step: Annotated[int, Meta(ge=1)]
    """1: the first step, before the optimizer has state."""
    phase: Phase
    block: str
    op: str
    allocated_bytes: Count
    reserved_bytes: Count
    tick: Count = 0
    """Event of the step's timeline; 0: before the step."""

    @property
    def free_bytes(self) -> int:
        """Reserved and held by no block: too scattered for the request."""
        return self.reserved_bytes - self.allocated_bytes


class OtherSetting(Record):
    """The peaks of the same steps under other options of the allocator."""

    options: str
    """As `Card.options`."""
    allocated_bytes: Count
    reserved_bytes: Count
    refused: bool = False
    """Whether the card has no memory for a request; the peaks are then those up to the request."""


class UnknownMemory(Record):
    """Memory that a card may take and that cannot be derived without it."""

    what: str
    least_bytes: Count = 0
    most_bytes: Count | None = None
    """None: no bound is known. Records of earlier versions have some."""
    ops: tuple[str, ...] = ()
    """Operators of the step that may take it."""
    room_bytes: Count | None = None
    """What it may take beside them before the allocated peak grows; None: a refused step, or not known."""


class CardMemory(Record):
    """What a card holds at the peaks of a step that is repeated until it finds the memory of a step before.

    Names as in `torch.cuda.memory_stats`. If steps differ, the peaks are the largest of the steps that repeat, or of
    all steps after the first if none repeats. If the card refused a request, the peaks are those up to it.
    """

    card: Card
    requested_bytes: Count
    """What tensors and workspaces asked for."""
    allocated_bytes: Count
    """The blocks handed out for it."""
    reserved_bytes: Count
    """The segments taken from the driver, at their peak: a cache that is emptied on the way counts until then."""
    least_allocated_bytes: Count | None = None
    """The least peak of these steps; None: a file of an earlier version."""
    least_reserved_bytes: Count | None = None
    workspace_bytes: Count = 0
    """Workspaces of cuBLAS, part of the three figures above."""
    n_steps: Count = 0
    """Steps that were played."""
    refused: RefusedRequest | None = None
    unknown: tuple[UnknownMemory, ...] = ()
    not_checked: tuple[str, ...] = ()
    """Settings whose rules were never held against the history of a real card."""
    not_played: tuple[str, ...] = ()
    """Settings of the card without a rule here: the figures are those without them."""
    other_settings: tuple[OtherSetting, ...] = ()
    reserved: Column | None = None
    """Reserved bytes after each event of the last step, up to a refused request; None: a file of an earlier version."""

    @property
    def stranded_bytes(self) -> int:
        """Reserved beyond the allocated peak: memory that other programs cannot have and this step cannot use."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """What is left of the card; None: a request was refused, or the driver's share is not known."""
        driver_bytes = self.card.driver_bytes
        if self.refused is not None or driver_bytes is None:
            return None
        return self.card.total_bytes - driver_bytes - self.reserved_bytes

    def __str__(self) -> str:
        """The figures in bytes, the refused request, and what they leave out."""
        figures = ", ".join(f"{getattr(self, name):,} {name.removesuffix('_bytes')}" for name in FIGURES)
        refused = self.refused
        lines = [
            f"{self.card.name}{f', torch {self.card.torch}' if self.card.torch else ''}: {figures} bytes.",
            *([f"Refused: {refused.n_bytes:,} bytes in {refused.block}, {refused.op}."] if refused else []),
            *([f"Not known: {'; '.join(part.what for part in self.unknown)}."] if self.unknown else []),
        ]
        return "\n".join(lines)

    def headlines(self) -> dict[str, int | None]:
        """The derived figures that `--json` prints, under these names."""
        refused_bytes = self.refused.n_bytes if self.refused else None
        return {**{name: getattr(self, name) for name in FIGURES}, "refused_bytes": refused_bytes}
