"""Whether this process sees an imaginary card.

Every comparison of bits asks, so this file imports neither the builder of the stubs nor the table of cards, as run.py.
"""

from __future__ import annotations

import os

NAME = "IMAGINARY_NAME"
"""The variable that tells a process that it sees an imaginary card: the card's name."""


def sees_imaginary_card(device: str = "cuda") -> bool:
    """Whether this process sees an imaginary card and `device` is that card: without values, without times."""
    return device == "cuda" and NAME in os.environ
