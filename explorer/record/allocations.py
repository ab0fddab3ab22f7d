"""The memory timeline of a step: every allocation with its role, block and operator, and the phases of the step.

`Allocations` is the series that each memory chart and headline is computed from. `Ledger` is its state at one moment.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Annotated, Literal, get_args

from msgspec import Meta, field

from explorer.record.base import MOST_RANKS, Column, Count, Record, column

Role = Literal[
    "parameter",
    "buffer",
    "optimizer state",
    "input",
    "temporary",
    "saved activation",
    "recomputed",
    "gradient",
    "unattributed",
    "gathered parameter",
    "reduce-scatter buffer",
    "gradient bucket",
    "cuBLAS workspace",
]
ROLES: tuple[Role, ...] = get_args(Role)
"""Roles in stacking order, bottom first: torch's order of categories, with additional roles between them.

Records hold indices: a new role stands last."""
RANK_ROLES: tuple[Role, ...] = ("gathered parameter", "reduce-scatter buffer", "gradient bucket")
"""Buffers of FSDP2 and DDP."""
FIXED_ROLES: tuple[Role, ...] = (
    "parameter",
    "buffer",
    "optimizer state",
    "gradient",
    "input",
    *RANK_ROLES,
    "cuBLAS workspace",
)
"""Roles that recomputing cannot free."""

Phase = Literal["forward", "recompute", "backward", "optimizer", "between"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""`between`: code of a user's loop outside the other four phases, such as clipping gradients."""


class PhaseSpan(Record):
    """A stretch of the timeline. `first_tick <= tick < end_tick`; spans follow each other without gaps."""

    phase: Phase
    block: str
    """Block that runs again, for `recompute`; the empty string elsewhere."""
    first_tick: Count
    end_tick: Count


class Calls(Record):
    """Forward calls of blocks in the order in which they began, one a row; ticks and entries are those of Allocations.

    What a call allocated is born after `first_tick` and not after `end_tick`.
    """

    block: Column = field(default_factory=column)
    """Index into `Allocations.blocks`."""
    first_tick: Column = field(default_factory=column)
    end_tick: Column = field(default_factory=column)
    n_inputs: Column = field(default_factory=column)
    n_outputs: Column = field(default_factory=column)
    entries: Column = field(default_factory=column)
    """Entries of the tensors that went in, then of those that came out, call after call, where an entry holds them."""
    line: Column = field(default_factory=column)
    """Index into `Allocations.lines`, of the code that calls the model; 0 for blocks inside; empty: not recorded."""


class Saves(Record):
    """Tensors that autograd saves in a step that keeps everything, one a row.

    Ticks and entries are those of Allocations. Autograd saves, reads and releases a tensor after the event of the tick;
    n_ticks + 1: not in the step.
    """

    entry: Column = field(default_factory=column)
    block: Column = field(default_factory=column)
    """Index into `Allocations.blocks`, of the innermost block whose forward saves the tensor."""
    view: Column = field(default_factory=column)
    """A number that equal views of one tensor share."""
    n_bytes: Column = field(default_factory=column)
    """Bytes of the view, without dimensions that are expanded."""
    saved_tick: Column = field(default_factory=column)
    read_tick: Column = field(default_factory=column)
    released_tick: Column = field(default_factory=column)
    """When autograd lets go of the tensor."""


class Allocations(Record):
    """Every allocation alive during the step, one entry a column; the chart and every headline come from here.

    A tick is one event of the allocator (an allocation or a free), counted from 1; tick 0 is the state before the step.
    An entry is alive at tick t when `born <= t < died`; `died == n_ticks + 1`: alive at the end.
    """

    n_ticks: Count
    n_bytes: Column
    born: Column
    died: Column
    role: Column
    """Index into ROLES."""
    block: Column
    """Index into `blocks`."""
    op: Column
    """Index into `ops`."""
    blocks: tuple[str, ...]
    ops: tuple[str, ...]
    time_ns: Column
    """Time of each tick 0..n_ticks since the start of the step, recording included; empty: not measured."""
    calls: Calls = field(default_factory=Calls)
    weight_casts: Column = field(default_factory=column)
    """Entries that are copies of parameters in another format: under autocast they stay until forward ends."""
    released: Column = field(default_factory=column)
    """The first tick at which the code of forward no longer holds each entry; 0 or empty: not observed."""
    dtype: Column = field(default_factory=column)
    """Index into `dtypes`, of the tensor that an operator returned first; empty: not recorded."""
    dtypes: tuple[str, ...] = ()
    """`float32`, `bool`; the empty string: no tensor is known."""
    stream: Column = field(default_factory=column)
    """The stream in which each entry was taken, 0 for the usual one; empty: all of them there."""
    line: Column = field(default_factory=column)
    """Index into `lines`, of the code that allocated, if no block below the model owns the entry; empty: not recorded.

    An allocation of backward has the line whose forward made the autograd node."""
    lines: tuple[str, ...] = ()
    """`loss (train.py:41)`, function and line of the user's code; the empty string: unknown, or a block owns it."""
    saves: Saves = field(default_factory=Saves)
    """Empty: not recorded."""

    @cached_property
    def held_bytes(self) -> Column:
        """Bytes alive at each tick 0..n_ticks."""
        deltas = [0] * (self.n_ticks + 2)
        for size, born, died in zip(self.n_bytes, self.born, self.died):
            deltas[born] += size
            deltas[died] -= size
        return column(accumulate(deltas[:-1]))

    @cached_property
    def peak_tick(self) -> int:
        """First tick at which most is held."""
        line = self.held_bytes
        return line.index(max(line))


CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "broadcast", "all-to-all", "point to point"]


class Collective(Record):
    """A call of torch.distributed in the step of one rank."""

    kind: CollectiveKind
    n_bytes: Count
    """The whole tensor: what an all-gather returns, what a reduce-scatter or all-reduce is called with."""
    n_ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    block: str
    """The unit of FSDP2 that it belongs to, else the innermost running block."""
    phase: Phase
    tick: Count
    """Last tick of the timeline before the call."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends by the ring algorithm: (n - 1) / n of the tensor, an all-reduce twice as much."""
        if self.kind in ("broadcast", "point to point"):
            return self.n_bytes
        return self.n_bytes * (self.n_ranks - 1) // self.n_ranks * (2 if self.kind == "all-reduce" else 1)


class LedgerCell(Record):
    """Allocations of one role in one block that are alive at the tick."""

    role: Role
    block: str
    n_bytes: int
    n_allocations: int
    largest_op: str
    """Operator that made the largest of them; the empty string: made before the step."""
    line: str = ""
    """The code that made them, if no block below the model owns them; see `Allocations.lines`."""

    @property
    def place(self) -> str:
        return self.block or self.line or "the model itself"


class Ledger(Record):
    """Everything alive at `tick`, largest cell first."""

    tick: int
    phase: Phase | None
    """The phase at the tick; None before the step, or if the phases were not recorded."""
    phase_block: str
    """Block that runs again at the tick; the empty string outside recompute."""
    phase_share: float | None
    """Progress of the phase, 0 at its first tick and 1 at its last; backward includes its recomputes."""
    at_block: str
    """Block whose allocation or free is the tick; the empty string: the model itself, or unknown."""
    is_peak: bool
    cells: tuple[LedgerCell, ...]

    @cached_property
    def total_bytes(self) -> int:
        return sum(cell.n_bytes for cell in self.cells)

    @cached_property
    def by_role(self) -> dict[Role, int]:
        """Bytes of each role, every role named, in stacking order."""
        totals: dict[Role, int] = dict.fromkeys(ROLES, 0)
        for cell in self.cells:
            totals[cell.role] += cell.n_bytes
        return totals

    @cached_property
    def by_block(self) -> dict[str, int]:
        """Bytes of each block, largest first."""
        totals: dict[str, int] = {}
        for cell in self.cells:
            totals[cell.block] = totals.get(cell.block, 0) + cell.n_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))
