"""A budget as people type it: `60 MiB`, `50 %` of the peak with everything kept, `+10 % time`."""

from __future__ import annotations

import re

from explorer.errors import BadInput
from explorer.plan.sizes import parse_bytes
from explorer.record.plan import Wish

EXAMPLES = "Such as 60 MiB, 50 % or +10 % time."
_WISH = re.compile(r"([+-]?)\s*(\d+(?:[.,]\d+)?|[.,]\d+)\s*(%?)\s*([a-z]*)")
MOST_SHARE = 2.0
"""Largest budget as a multiple of the peak with everything kept: a larger budget is a typing error."""
MOST_MORE_TIME = 100.0
"""Largest extra time as a multiple of the step: no plan takes longer."""


def parse_wish(text: str, keep_all_bytes: int) -> Wish:
    """The budget in `text`. Raises BadInput for a text that is no possible budget."""
    match = _WISH.fullmatch(text.strip().lower())
    if match is None:
        raise BadInput(f"{text.strip()[:40]!r} is not a budget.", hint=EXAMPLES)
    sign, number, percent, word = match.groups()
    amount = float(number.replace(",", "."))
    if sign == "-":
        raise BadInput(f"A budget cannot be less than nothing, and {text.strip()} is.", hint=EXAMPLES)
    if percent and (word == "time" or (sign and not word)):
        if amount / 100 > MOST_MORE_TIME:
            raise BadInput(f"No step needs {text.strip()}.", hint=EXAMPLES)
        return Wish(more_time=amount / 100)
    if sign or (percent and word) or word == "time":
        raise BadInput(f"{text.strip()!r} is neither memory nor time.", hint=EXAMPLES)
    if not amount:
        raise BadInput(f"A budget of {text.strip()} leaves room for nothing.", hint=EXAMPLES)
    if percent and amount / 100 > MOST_SHARE:
        raise BadInput(f"A budget of {text.strip()} is more than twice what keeping everything needs.", hint=EXAMPLES)
    if percent:
        return Wish(budget_bytes=int(amount / 100 * keep_all_bytes))
    if not word:
        raise BadInput(f"{text.strip()} has no unit.", hint=f"{number} MiB, {number} % of what keeping all needs?")
    return Wish(budget_bytes=parse_bytes(f"{number.replace(',', '.')}{word}"))
