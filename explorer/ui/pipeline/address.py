"""The pipeline plan in the address bar: readable, and read strictly.

`?cuts=3.6&microbatches=8&schedule=1F1B` puts the first three blocks of the chain on stage 0 and the next three on
stage 1. Default values are left out. An unreadable part gives a sentence, never half a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import get_args

import msgspec

from explorer.errors import UnreadableFile, nearest
from explorer.plan.pipeline.schedules import SCHEDULES, USUAL
from explorer.record.base import limits
from explorer.record.graph import ModelGraph
from explorer.record.run import CheckpointMode, PipelinePlan

MOST_MICROBATCHES: int = limits(PipelinePlan, "n_microbatches")[1]
MOST_RANKS: int = limits(PipelinePlan, "n_ranks")[1]
UNCUT = "0"
"""`cuts=` of a plan with a single stage."""
WORDS: dict[str, tuple[str, ...]] = {"schedule": tuple(SCHEDULES), "checkpoint": get_args(CheckpointMode)}
NUMBERS = {"n_microbatches": ("microbatches", MOST_MICROBATCHES), "n_ranks": ("ranks", MOST_RANKS)}
SWITCHES = {"keyed_rng": "keyed", "deferred_batch_norm": "deferred"}


def to_query(choices: PipelinePlan, stages: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    """The address of a plan with these stages. No address holds the rows of an own schedule."""
    query = {"cuts": ".".join(map(str, accumulate(len(stage) for stage in stages[:-1]))) or UNCUT}
    names = (*NUMBERS, *WORDS, *SWITCHES)
    changed = {name: getattr(choices, name) for name in names if getattr(choices, name) != getattr(USUAL, name)}
    query |= {word: str(changed[name]) for name, (word, _) in NUMBERS.items() if name in changed}
    query |= {name: changed[name] for name in WORDS if name in changed}
    return query | {word: str(int(changed[name])) for name, word in SWITCHES.items() if name in changed}


def from_query(query: Mapping[str, str]) -> tuple[PipelinePlan, list[int] | None]:
    """The choices of an address, and behind how many blocks it cuts. Raises UnreadableFile with all faults."""
    chosen: dict[str, object] = {}
    places: list[int] | None = None
    faults = []
    for name, (word, most) in NUMBERS.items():
        if (text := query.get(word)) is not None:
            chosen[name] = number = _number(text)
            if number is None or number > most:
                faults.append(f"{word}={text} is no number from 1 to {most}")
    for name, allowed in WORDS.items():
        if (text := query.get(name)) is not None:
            chosen[name] = text
            if text not in allowed:
                faults.append(f"{name}={text} is not known. {nearest(text, allowed) or ''}".rstrip())
    for name, word in SWITCHES.items():
        if (text := query.get(word)) is not None:
            chosen[name] = text == "1"
            if text not in ("0", "1"):
                faults.append(f"{word}={text} is neither 0 nor 1")
    if (text := query.get("cuts")) is not None:
        numbers = [] if text == UNCUT else [_number(part) for part in text.split(".")]
        places = [number for number in numbers if number is not None]
        if len(places) < len(numbers) or any(b <= a for a, b in pairwise(places)):
            faults.append(f"cuts={text} are no ascending numbers of blocks")
    if faults:
        raise UnreadableFile(f"The link's plan cannot be read: {'; '.join(faults)}.", hint="Copy the address again.")
    return msgspec.structs.replace(USUAL, **chosen), places


def cuts_at(places: list[int], graph: ModelGraph) -> list[str]:
    """Ids of the cuts behind the first `places` blocks. Raises UnreadableFile if the model has no such cut."""
    legal = {(cut.after, cut.before): cut.refusal for cut in graph.cuts}
    faults, cuts = [], []
    for place in places:
        pair = (graph.chain[place - 1], graph.chain[place]) if place < len(graph.chain) else None
        if pair is None or pair not in legal:
            faults.append(f"there is no place behind block {place} of {len(graph.chain)}")
        elif legal[pair]:
            faults.append(f"no cut behind {pair[0]}: {legal[pair]}")
        else:
            cuts.append(f"{pair[0]}>{pair[1]}")
    if faults:
        raise UnreadableFile(f"The link's cuts do not fit this model: {'; '.join(faults)}.", hint="Choose other cuts.")
    return cuts


def _number(text: str) -> int | None:
    """A whole number from 1; None for any other text."""
    return (int(text) or None) if text.isascii() and text.isdigit() and len(text) < 7 else None
