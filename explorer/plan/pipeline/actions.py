"""A schedule as short text: one row of actions a rank, in the grammar that torch's pipeline runtime reads.

    0F0 0F1     0B0 0B1       stage 0 runs forward of microbatches 0 and 1, then their backward
        1F0 1B0 1F1 1B1       stage 1 starts later; empty cells are waiting and carry no meaning

`2F0` forward, `2B0` full backward, `2I0` gradient of the stage's input, `2W0` gradient of its weights; B = I + W.
torch's overlapped pair `(0F1;1B0)OVERLAP_F_B` is read as its two actions, one after the other, as one rank runs them.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from explorer.errors import InvalidPlan, message_of

KINDS = "FBIW"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One stage's forward (F), backward (B), input gradient (I) or weight gradient (W) of one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Rows = tuple[tuple[Action, ...], ...]
"""Row r is what rank r does, in order."""


def parse_action(text: str) -> Action:
    """`2F0` -> Action(2, "F", 0). Raises InvalidPlan."""
    if match := _ACTION.fullmatch(text.strip()):
        return Action(int(match[1]), match[2], int(match[3]))
    raise InvalidPlan(f"{text!r} is not an action.", hint="Write stage, kind and microbatch: 2F0, 2B0, 2I0 or 2W0.")


def parse_rows(rows: Iterable[Sequence[str]]) -> Rows:
    """Cells of text -> actions, empty cells left out. Raises InvalidPlan that names every bad cell at once."""
    parsed, faults = [], []
    for rank, row in enumerate(rows):
        actions: list[Action] = []
        for cell_index, cell in enumerate(row):
            text = cell.strip()
            match = _OVERLAP.fullmatch(text)
            for part in match[1].split(";") if match else [text] * bool(text):
                try:
                    actions.append(parse_action(part))
                except InvalidPlan:
                    faults.append(f"{part.strip()!r} (rank {rank}, cell {cell_index})")
        parsed.append(tuple(actions))
    if faults:
        raise InvalidPlan(
            f"The schedule has {len(faults)} cells that are not actions: {', '.join(faults[:5])}.",
            hint="Write stage, kind and microbatch: 2F0, 2B0, 2I0 or 2W0.",
        )
    return tuple(parsed)


def format_rows(rows: Rows) -> tuple[tuple[str, ...], ...]:
    """The text of every action, as PipelinePlan.actions holds it."""
    return tuple(tuple(str(action) for action in row) for row in rows)


def to_csv(rows: Rows) -> str:
    """The rows as text, a line for each rank: the file that torch's runtime loads as `compute_only`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(format_rows(rows))
    return out.getvalue()


def from_csv(text: str) -> Rows:
    """Reads what `to_csv` or torch's `_dump_csv` wrote. Raises InvalidPlan that names every bad cell.

    Communication and gradient-reduction cells (SEND_F, RECV_B, REDUCE_GRAD, ...) follow from the rest and are left out.
    """
    rows = [[cell for cell in row if not _is_communication(cell)] for row in csv.reader(io.StringIO(text))]
    while rows and not rows[-1]:
        rows.pop()
    return parse_rows(rows)


def read_rows(path: Path) -> Rows:
    """An own schedule's file. Raises InvalidPlan where it is missing, no text, or without an action."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidPlan(f"The schedule {path} cannot be read: {error.strerror}.", hint="Name a CSV file.") from error
    return rows_in(data, str(path))


def rows_in(data: bytes, name: str) -> Rows:
    """The rows in the bytes of a file called `name`. Raises InvalidPlan where they are no text, or hold no action."""
    try:
        rows = from_csv(data.decode("utf-8"))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidPlan(
            f"The schedule {name} is not text: {message_of(error)}.",
            hint="Write one line of actions a rank: 0F0,0F1,0B0,0B1.",
        ) from error
    if not any(rows):
        raise InvalidPlan(
            f"The schedule {name} holds no action.", hint="Write one line of actions a rank: 0F0,0F1,0B0,0B1."
        )
    return rows


def stage_ranks(rows: Rows) -> dict[int, int]:
    """The rank of each stage, by stage number."""
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    return dict(sorted(rank_of.items()))


def _is_communication(cell: str) -> bool:
    return bool(re.fullmatch(r"\s*\d+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*\s*", cell))
