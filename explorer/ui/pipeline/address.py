"""What the address bar says of a pipeline plan: readable, and read strictly.

`?cuts=3.6&microbatches=8&schedule=1F1B` puts the first three blocks of the spine on stage 0 and the next three on
stage 1. What is usual is left out; a part that cannot be read gets a sentence, never half a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from explorer.errors import UnreadableFile, nearest
from explorer.plan.pipeline.schedules import SCHEDULES
from explorer.record.graph import ModelGraph
from explorer.record.pipeline_plan import CheckpointMode

MOST_MICROBATCHES = 256
UNCUT = "0"
"""`cuts=` of a plan with a single stage."""
USUAL: dict[str, Any] = {
    "n_microbatches": 4,
    "schedule": "1F1B",
    "checkpoint": "always",
    "keyed_rng": True,
    "deferred_batch_norm": False,
}
"""The choices of a person who has made none."""
WORDS: dict[str, tuple[str, ...]] = {"schedule": tuple(SCHEDULES), "checkpoint": get_args(CheckpointMode)}
SWITCHES = {"keyed_rng": "keyed", "deferred_batch_norm": "deferred"}


def to_query(choices: Mapping[str, Any], stages: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    """The address of a plan; `choices` has the keys of USUAL."""
    places, place = [], 0
    for stage in stages[:-1]:
        place += len(stage)
        places.append(str(place))
    query = {"cuts": ".".join(places) or UNCUT}
    if choices["n_microbatches"] != USUAL["n_microbatches"]:
        query["microbatches"] = str(choices["n_microbatches"])
    query |= {name: choices[name] for name in WORDS if choices[name] != USUAL[name]}
    return query | {word: str(int(choices[name])) for name, word in SWITCHES.items() if choices[name] != USUAL[name]}


def from_query(query: Mapping[str, str]) -> dict[str, Any]:
    """The choices of an address, and under `places` where it cuts. Raises UnreadableFile with all faults."""
    found: dict[str, Any] = {}
    faults = []
    if (text := query.get("microbatches")) is not None:
        found["n_microbatches"] = _number(text)
        if not 1 <= found["n_microbatches"] <= MOST_MICROBATCHES:
            faults.append(f"microbatches={text} is no number from 1 to {MOST_MICROBATCHES}")
    for name, known in WORDS.items():
        if (text := query.get(name)) is not None:
            found[name] = text
            if text not in known:
                faults.append(f"{name}={text} is not known. {nearest(text, known) or ''}".rstrip())
    for name, word in SWITCHES.items():
        if (text := query.get(word)) is not None:
            found[name] = text == "1"
            if text not in ("0", "1"):
                faults.append(f"{word}={text} is neither 0 nor 1")
    if (text := query.get("cuts")) is not None:
        places = [] if text == UNCUT else [_number(part) for part in text.split(".")]
        found["places"] = places
        if any(place < 1 for place in places) or any(b <= a for a, b in zip(places, places[1:])):
            faults.append(f"cuts={text} are no ascending numbers of blocks")
    if faults:
        raise UnreadableFile(f"The link's plan cannot be read: {'; '.join(faults)}.", hint="Copy the address again.")
    return found


def cuts_at(places: list[int], graph: ModelGraph) -> list[str]:
    """Ids of the cuts behind the first `places` blocks. Raises UnreadableFile where the model has no such cut."""
    legal = {(cut.after, cut.before): cut.refusal for cut in graph.cuts}
    faults, found = [], []
    for place in places:
        pair = (graph.spine[place - 1], graph.spine[place]) if place < len(graph.spine) else None
        if pair is None or pair not in legal:
            faults.append(f"there is no place behind block {place} of {len(graph.spine)}")
        elif legal[pair]:
            faults.append(f"no cut behind {pair[0]}: {legal[pair]}")
        else:
            found.append(f"{pair[0]}>{pair[1]}")
    if faults:
        raise UnreadableFile(f"The link's cuts do not fit this model: {'; '.join(faults)}.", hint="Cut it anew.")
    return found


def _number(text: str) -> int:
    """-1 for what is no plain number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else -1
