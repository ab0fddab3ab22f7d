"""What `run --card` is asked for: it crosses to the processes that see an imaginary card."""

from __future__ import annotations

from explorer.record.base import Record


class OnCardRequest(Record):
    """`steps` None: until the peak repeats. `ranks` None: not under torchrun. `out` names the file of the last step."""

    card: str
    out: str
    json: bool
    steps: int | None = None
    ranks: int | None = None
