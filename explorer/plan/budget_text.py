"""Budgets as people write them, on the page, on the command line and in a script.

A budget is memory (`60 MiB`, `1.5 GB`, `1e9`, `50 %`, `half`), time (`+10 % time`), or both, separated by a comma.
sizes.py reads sizes by one strict rule, because limits, cards and locks have no place for a note. A budget is typed by
hand: forms that leave room for doubt are read too, and `Wish.understood` says how.
"""

from __future__ import annotations

import math
import re

from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan.sizes import UNITS, mib
from explorer.record.measurement import Measurement
from explorer.record.plan import Wish

DEVICE = "device"
"""The budget that stands for all free memory of the device."""
CARD = "card"
"""The budget that stands for the card of a predicted step."""
EXAMPLES = "Such as 60 MiB, 50 % or +10 % time."
MOST_SHARE = 2.0
"""Largest budget as a multiple of the peak with everything kept: a larger budget is a typing error."""
MOST_BYTES = 2**50
MOST_MORE_TIME = 100.0
"""Largest extra time as a multiple of the step: no plan takes longer."""
LONGEST = 80
"""Characters of the longest budget."""

_BETWEEN = re.compile(r"\s*(?:;|&|\band\b|,(?!\d)|(?<=[a-z%]),|\s(?=\+))\s*", re.IGNORECASE)
"""What separates a budget of memory from one of time. A comma between digits is a decimal comma."""
_AT_MOST = re.compile(
    r"(?:<=?|=<|≤|at most|up to|under|below|within|less than|no more than|max(?:imum)?\b\.?)\s*", re.IGNORECASE
)
_AT_LEAST = re.compile(r"(?:>|=>|≥|at least|more than|over|above|min\b)", re.IGNORECASE)
_OF_THE_PEAK = r"(?:of )?(?:the )?(?:peak|memory)"
_PART = re.compile(rf"(?:(?:an?|one|the) )?(half|third|quarter)(?: {_OF_THE_PEAK})?|(\d+)/(\d+)", re.IGNORECASE)
_PARTS = {"half": 2, "third": 3, "quarter": 4}
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<number>(?:\d[\d_,' ]*)?(?:[.,]\d+)?(?:e[+-]?\d+)?)"
    r"\s*(?P<percent>%?)\s*(?P<word>[a-z][a-z ]*)?",
    re.IGNORECASE,
)
_TIMES = re.compile(r"(?:x\s*([\d.,]+)|([\d.,]+)\s*x)\s*(?:the )?(?:step )?time", re.IGNORECASE)
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:([,' ])\d{3})(?:\1\d{3})*(?:\.\d+)?")
_TIME_WORDS = {"time", "more time", "extra time", "step time", "longer", "slower", "runtime"}
_PERCENT = re.compile(r"(?<=\d)\s*(?:percent|per cent|pct)\b", re.IGNORECASE)
_ASCII = {ord(sign): plain for sign, plain in (("\N{MINUS SIGN}", "-"), ("％", "%"), ("×", "x"), ("’", "'"))}

_LOOSE_UNITS = {
    name: letter
    for letter, long in (("k", "kilo"), ("m", "mega"), ("g", "giga"), ("t", "tera"))
    for name in (letter, f"{letter}i", f"{letter}b", f"{letter}bs", f"{long}byte", f"{long}bytes")
} | {f"{short}{s}": short[0] for short in ("meg", "gig") for s in ("", "s")}
_STRICT_UNITS = {**UNITS, "byte": 1, "bytes": 1} | {
    f"{long}bibyte{s}": UNITS[f"{letter}ib"]
    for letter, long in (("k", "ki"), ("m", "me"), ("g", "gi"), ("t", "te"))
    for s in ("", "s")
}


def check_budget(text: str) -> Wish:
    """How `text` is read before a step is measured: shares have no bytes yet. Raises BadInput for what is no budget."""
    word = text.strip().lower()
    if word in (DEVICE, CARD):
        return Wish(card=word == CARD)
    return parse_wish(text, keep_all_bytes=0)


def parse_budget(budget: str | int, keep_all_bytes: int, run: Measurement) -> Wish:
    """The wish for a budget: what `parse_wish` reads, bytes, or the free memory (`device`) or the `card` of `run`.

    Raises BadInput for what is no possible budget, and for a device or card that the run does not have.
    """
    if isinstance(budget, int):
        return Wish(budget_bytes=budget) if budget > 0 else parse_wish(f"{budget} B", keep_all_bytes)
    word = budget.strip().lower()
    if word == CARD:
        if run.card is None:
            raise BadInput("The step is not predicted for a card.", hint="Name a card among the options of the step.")
        return Wish(card=True)
    return Wish(budget_bytes=_free_bytes(run)) if word == DEVICE else parse_wish(budget, keep_all_bytes)


def _free_bytes(run: Measurement) -> int:
    if run.free_memory_bytes is None:
        raise BadInput("The run does not say what its device had free.", hint="Give the budget as a size.")
    # A recorded step still holds bytes at its end, which count as available; a measured step has freed all its bytes.
    log = run.allocations
    still_held = log.held_bytes[-1] if log is not None and run.origin == "recorded" else 0
    # A sixteenth is left for fragmentation and other processes.
    return run.free_memory_bytes - run.free_memory_bytes // 16 + still_held


def parse_wish(text: str, keep_all_bytes: int) -> Wish:
    """The budget in `text`: at most one of memory and at most one of time. Raises BadInput.

    `keep_all_bytes`: the peak with everything kept, of which a share is meant.
    """
    budget = " ".join(text.split())
    if len(budget) > LONGEST:
        raise BadInput(f"'{budget[:40]} ...' is not a budget.", hint=EXAMPLES)
    plain = _PERCENT.sub(" %", budget.translate(_ASCII))
    wishes = [_one(part, keep_all_bytes) for part in filter(None, _BETWEEN.split(plain))]
    if not wishes:
        raise BadInput(f"{budget!r} is not a budget.", hint=EXAMPLES)
    memory = [wish for wish in wishes if wish.budget_bytes is not None]
    time = [wish for wish in wishes if wish.more_time is not None]
    if len(memory) > 1 or len(time) > 1:
        raise BadInput(f"{budget!r} names two limits of one kind.", hint="Such as 60 MiB, +10 % time.")
    understood = " and ".join(filter(None, (wish.understood for wish in wishes)))
    if memory and time:
        (limit,) = memory
        understood = f"at most {limit.understood or _bytes_in_words(limit)}, and at most {_time_in_words(time[0])}"
        return replace(limit, more_time=time[0].more_time, understood=understood)
    return replace(wishes[0], understood=understood)


def _bytes_in_words(wish: Wish) -> str:
    return mib(wish.budget_bytes or 0)


def _time_in_words(wish: Wish) -> str:
    return f"{100 * (wish.more_time or 0.0):g} % more time"


def _one(part: str, keep_all_bytes: int) -> Wish:
    """A budget of memory or of time. `understood` is empty where the text has one meaning only."""
    if _AT_LEAST.match(part):
        raise BadInput(f"A budget is the most that may be used, and {part!r} is the least.", hint=EXAMPLES)
    limit = _AT_MOST.match(part)
    text = part[limit.end() :] if limit else part
    if match := _PART.fullmatch(text):
        above, below = (1, _PARTS[match[1].lower()]) if match[1] else (int(match[2]), int(match[3]))
        if not above or not below:
            raise BadInput(f"A budget of {part} leaves room for nothing.", hint=EXAMPLES)
        wish = _share(part, above / below, keep_all_bytes)
        return replace(wish, understood=f"{100 * above / below:.4g} % of the peak with everything kept")
    if match := _TIMES.fullmatch(text):
        ratio = _number((match[1] or match[2]), part)
        wish = _more_time(part, round(ratio - 1, 9))
        return replace(wish, understood=_time_in_words(wish))
    match = _QUANTITY.fullmatch(text)
    if match is None or not match["number"]:
        raise BadInput(f"{part!r} is not a budget.", hint=EXAMPLES)
    wish = _quantity(part, match, keep_all_bytes)
    if limit and not wish.understood and wish.budget_bytes is not None and not match["percent"]:
        return replace(wish, understood=f"at most {_bytes_in_words(wish)}")
    return wish


def _quantity(part: str, match: re.Match[str], keep_all_bytes: int) -> Wish:
    """The wish of a number with its sign, percent sign and unit."""
    number, word = match["number"].strip(), " ".join((match["word"] or "").split())
    amount, is_time = _number(number, part), word.lower() in _TIME_WORDS
    if match["sign"] == "-":
        left = 100 - amount if match["percent"] and not is_time else 0
        hint = f"For {amount:g} % less write {left:g} %." if 0 < left < 100 else EXAMPLES
        raise BadInput(f"A budget cannot be less than nothing, and {part} is.", hint=hint)
    if match["percent"] and (is_time or (match["sign"] and not word)):
        return _more_time(part, amount / 100)
    of_the_peak = bool(match["percent"] and re.fullmatch(_OF_THE_PEAK, word, re.IGNORECASE))
    if match["sign"] or is_time or (match["percent"] and word and not of_the_peak):
        raise BadInput(f"{part!r} is neither memory nor time.", hint=EXAMPLES)
    if not amount:
        raise BadInput(f"A budget of {part} leaves room for nothing.", hint=EXAMPLES)
    if match["percent"]:
        return _share(part, amount / 100, keep_all_bytes)
    return _size(part, number, amount, word)


def _number(text: str, part: str) -> float:
    """The value of digits with `_`, a decimal comma, groups of three digits or an exponent."""
    digits = text.replace("_", "")
    if _THOUSANDS.fullmatch(digits):
        digits = re.sub(r"[,' ]", "", digits)
    try:
        amount = float(digits.replace(",", "."))
    except ValueError:
        raise BadInput(f"{part!r} is not a budget.", hint=EXAMPLES) from None
    if not math.isfinite(amount):
        raise BadInput(f"A budget of {part} is more than any device has.", hint=EXAMPLES)
    return amount


def _more_time(part: str, more_time: float) -> Wish:
    if more_time > MOST_MORE_TIME:
        raise BadInput(f"No step needs {part}.", hint=EXAMPLES)
    if more_time < 0:
        raise BadInput(f"Recomputing makes no step faster, and {part} asks for less time.", hint=EXAMPLES)
    return Wish(more_time=more_time)


def _share(part: str, share: float, keep_all_bytes: int) -> Wish:
    if share > MOST_SHARE:
        raise BadInput(f"A budget of {part} is more than twice what keeping everything needs.", hint=EXAMPLES)
    return Wish(budget_bytes=int(share * keep_all_bytes))


def _size(part: str, number: str, amount: float, word: str) -> Wish:
    """The wish of a size. Units in thousands are read in 1,024s, and `understood` has the size that was read."""
    unit = _STRICT_UNITS.get(word.lower()) if word else None
    letter = _LOOSE_UNITS.get(word.lower())
    if letter is not None:
        unit = UNITS[f"{letter}ib"]
    elif not word and ("_" in number or "e" in number.lower()):  # as code writes a number of bytes
        unit = 1
    elif not word:
        share = f", {number} % of what keeping all needs" if amount <= 100 * MOST_SHARE else ""
        raise BadInput(f"{part} has no unit.", hint=f"{number} MiB{share}, or {number} bytes?")
    if unit is None:
        raise BadInput(f"{part!r} is not a size.", hint="Sizes are written as 1.5GiB, 800MiB, 64KiB or 123456B.")
    n_bytes = amount * unit
    if n_bytes > MOST_BYTES:
        raise BadInput(f"A budget of {part} is more than any device has.", hint=EXAMPLES)
    if n_bytes < 1:
        raise BadInput(f"A budget of {part} leaves room for nothing.", hint=EXAMPLES)
    wish = Wish(budget_bytes=int(n_bytes))
    if letter is not None:
        understood = f"{_bytes_in_words(wish)}, taking 1 {word} for 1 {letter.upper()}iB"
        wish = replace(wish, understood=understood)
    elif unit == 1 and word == "":
        wish = replace(wish, understood=f"{int(n_bytes):,} bytes, {_bytes_in_words(wish)}")
    elif _THOUSANDS.fullmatch(number):
        wish = replace(wish, understood=_bytes_in_words(wish))
    return wish
