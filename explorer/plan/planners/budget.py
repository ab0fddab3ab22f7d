"""Budgets as people type them: `60 MiB`, `50 %` of the peak with everything kept, `+10 % time`, `device`."""

from __future__ import annotations

import re

from explorer.errors import BadInput
from explorer.plan.sizes import parse_bytes
from explorer.record.measurement import Measurement
from explorer.record.plan import Wish

DEVICE = "device"
"""The budget that stands for all free memory of the device."""
EXAMPLES = "Such as 60 MiB, 50 % or +10 % time."
_WISH = re.compile(r"([+-]?)\s*(\d+(?:[.,]\d+)?|[.,]\d+)\s*(%?)\s*([a-zA-Z]*)")
MOST_SHARE = 2.0
"""Largest budget as a multiple of the peak with everything kept: a larger budget is a typing error."""
MOST_BYTES = 2**50
MOST_MORE_TIME = 100.0
"""Largest extra time as a multiple of the step: no plan takes longer."""


def parse_wish(text: str, keep_all_bytes: int) -> Wish:
    """The budget in `text`. Raises BadInput for a text that is no possible budget."""
    match = _WISH.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"{text.strip()[:40]!r} is not a budget.", hint=EXAMPLES)
    sign, number, percent, word = match.groups()
    amount, is_time = float(number.replace(",", ".")), word.lower() == "time"
    if sign == "-":
        raise BadInput(f"A budget cannot be less than nothing, and {text.strip()} is.", hint=EXAMPLES)
    if percent and (is_time or (sign and not word)):
        if amount / 100 > MOST_MORE_TIME:
            raise BadInput(f"No step needs {text.strip()}.", hint=EXAMPLES)
        return Wish(more_time=amount / 100)
    if sign or (percent and word) or is_time:
        raise BadInput(f"{text.strip()!r} is neither memory nor time.", hint=EXAMPLES)
    if not amount:
        raise BadInput(f"A budget of {text.strip()} leaves room for nothing.", hint=EXAMPLES)
    if percent and amount / 100 > MOST_SHARE:
        raise BadInput(f"A budget of {text.strip()} is more than twice what keeping everything needs.", hint=EXAMPLES)
    if percent:
        return Wish(budget_bytes=int(amount / 100 * keep_all_bytes))
    if not word:
        raise BadInput(f"{text.strip()} has no unit.", hint=f"{number} MiB, {number} % of what keeping all needs?")
    n_bytes = parse_bytes(f"{number.replace(',', '.')}{word}")
    if n_bytes > MOST_BYTES:
        raise BadInput(f"A budget of {text.strip()} is more than any device has.", hint=EXAMPLES)
    return Wish(budget_bytes=n_bytes)


def check_budget(budget: str) -> None:
    """Raises BadInput for a text that is no budget of memory, before a step is measured."""
    if budget != DEVICE:
        _wished_bytes(budget, 0)


def parse_budget(budget: str | int, keep_all_bytes: int, run: Measurement) -> int:
    """Bytes of a budget: `1.5GiB`, `60%` of the peak with everything kept, or `device` of `run`. Raises BadInput."""
    if isinstance(budget, int) and budget > 0:
        return budget
    if budget == DEVICE:
        return _device_bytes(run)
    return _wished_bytes(str(budget), keep_all_bytes)


def _wished_bytes(budget: str, keep_all_bytes: int) -> int:
    n_bytes = parse_wish(budget, keep_all_bytes).budget_bytes
    if n_bytes is None:
        raise BadInput(
            f"A budget of {budget} is time, and memory was asked for.",
            hint="Give a size (1.5GiB) or a share (60%); the least memory for more time is --time +10%.",
        )
    return n_bytes


def _device_bytes(run: Measurement) -> int:
    """Bytes that were free after the run, minus a sixteenth for fragmentation and other processes.

    A recorded step still holds bytes at its end, which count as available; a measured step has freed all its bytes.
    """
    if run.free_memory_bytes is None:
        raise BadInput("The run does not say what its device had free.", hint="Give the budget as a size.")
    log = run.allocations
    still_held = log.held_bytes[-1] if log is not None and run.origin == "recorded" else 0
    return run.free_memory_bytes - run.free_memory_bytes // 16 + still_held


def parse_share(text: str) -> float:
    """`+10%` or `60%` as a share. Raises BadInput."""
    stripped = text.strip()
    try:
        share = float(stripped.removesuffix("%")) / 100
    except ValueError:
        share = None
    if share is None or not stripped.endswith("%") or not 0 <= share < 1e6:
        raise BadInput(f"{text!r} is not a share.", hint="Shares are written as 60% or +10%.")
    return share
