"""Common cards by name, and any other card by its size.

`total_bytes` is what torch reports. Where a message of torch is the source, it has two decimals of GiB, so the figure
is known to 5 MiB. Drivers differ too: messages on A100 cards of 80 GB name 79.14 to 79.25 GiB.
"""

from __future__ import annotations

import os
import re

from msgspec.structs import replace

from explorer.errors import BadInput, nearest
from explorer.plan.sizes import mib, parse_bytes
from explorer.record.base import limits
from explorer.record.card import Card

GIB = 1 << 30
DRIVER_BYTES = (256 << 20, 800 << 20)
"""Assumed share of driver and context where it is not known. No source: the B200, the one card known, has 783 MiB."""

LARGEST_CARD = limits(Card, "total_bytes")[1]

CARDS: dict[str, Card] = {
    # csdiywithme/cs336-assignment2-systems at bb85bbf8: messages of refused requests, torch 2.11
    "b200": Card(name="B200", total_bytes=int(178.35 * GIB), taken_bytes=int(0.765 * GIB), capability="10.0"),
    # vllm-project/vllm, issue 27508
    "h100": Card(name="H100 80GB", total_bytes=int(79.11 * GIB), capability="9.0"),
    # levihsu/OOTDiffusion, issue 235
    "a100-80gb": Card(name="A100 80GB", total_bytes=int(79.25 * GIB), capability="8.0"),
    # threestudio-project/threestudio, issue 402
    "a100-40gb": Card(name="A100 40GB", total_bytes=int(39.56 * GIB), capability="8.0"),
    # NVlabs/Eagle, issue 68
    "l40": Card(name="L40", total_bytes=int(44.40 * GIB), capability="8.9"),
    # ArcInstitute/evo2, issue 190
    "l4": Card(name="L4", total_bytes=int(22.03 * GIB), capability="8.9"),
    # ali-vilab/VGen, issue 104
    "rtx4090": Card(name="RTX 4090", total_bytes=int(23.64 * GIB), capability="8.9"),
    # GaoLii/DSP, issue 10
    "rtx3090": Card(name="RTX 3090", total_bytes=int(23.70 * GIB), capability="8.6"),
    # Zheng-Chong/CatVTON, issue 133; older drivers left more (14.76 GiB in bupticybee/FastLoRAChat, issue 6)
    "t4": Card(name="T4", total_bytes=int(14.56 * GIB), capability="7.5"),
}


def parse_card(text: str) -> Card:
    """The card named `text`, in any case and with or without spaces, or a card of that size (`24GiB`).

    CUBLAS_WORKSPACE_CONFIG of this process decides its workspaces.
    Raises BadInput for other texts, and for a size that driver and context may fill alone.
    """
    if (card := listed_card(text)) is not None:
        return card
    try:
        n_bytes = parse_bytes(text)
    except BadInput as error:
        raise BadInput(
            f"{text[:60]!r} is neither a card that is listed here nor a size.",
            hint=nearest(text.lower(), CARDS) or f"Name one of {', '.join(CARDS)}, or the card's memory: 24GiB.",
        ) from error
    if not DRIVER_BYTES[1] < n_bytes <= LARGEST_CARD:
        raise BadInput(
            f"No step fits a card of {mib(n_bytes)}: driver and context may take {mib(DRIVER_BYTES[1])} of it."
            if n_bytes <= LARGEST_CARD
            else f"No card has {mib(n_bytes)}.",
            hint=f"Name one of {', '.join(CARDS)}, or the card's memory: 24GiB.",
        )
    return _as_set_here(Card(name=f"a card of {mib(n_bytes)}", total_bytes=n_bytes))


def listed_card(text: str) -> Card | None:
    """The card of CARDS that `text` names, in any case and with or without spaces; None for other texts."""
    key = re.sub(r"[\s-]", "", text.lower())
    return next((_as_set_here(card) for name, card in CARDS.items() if name.replace("-", "") == key), None)


def _as_set_here(card: Card) -> Card:
    return replace(card, cublas=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))


def capacity_bytes(card: Card) -> int:
    """What the allocator can reserve. An unknown share of the driver counts as the largest assumed."""
    return max(0, card.total_bytes - (DRIVER_BYTES[1] if card.taken_bytes is None else card.taken_bytes))
