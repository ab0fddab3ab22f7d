"""Predict first: what will the peak be? Four answers, of which the forecast is the key and the others are what people
usually think."""

from __future__ import annotations

from explorer.record.base import Record

_APART = 0.05
"""Answers that lie closer to another than this share of the right one are left out."""


class Guess(Record):
    """One answer, and what is right or wrong about it."""

    peak_bytes: int
    because: str
    right: bool = False


def peak_guesses(peak_bytes: int, saved_bytes: int, foreseen_bytes: int) -> tuple[Guess, ...]:
    """The largest first: the peak and the saved activations of the run that kept everything, and what is foreseen."""
    right = Guess(
        peak_bytes=foreseen_bytes,
        because="Every block still keeps its input, and one block at a time is made again in backward.",
        right=True,
    )
    wrong = (
        Guess(
            peak_bytes=peak_bytes,
            because="The peak lies where forward ends and everything is kept: less kept is less held there.",
        ),
        Guess(
            peak_bytes=peak_bytes // 2,
            because="It is no fixed share: it depends on what the blocks keep inside, and that is more than half here.",
        ),
        Guess(
            peak_bytes=max(peak_bytes - saved_bytes, 0),
            because="Not all of it goes: each block keeps its input, and backward makes one block whole again.",
        ),
    )
    guesses = [right]
    for guess in wrong:
        if all(abs(guess.peak_bytes - other.peak_bytes) > _APART * foreseen_bytes for other in guesses):
            guesses.append(guess)
    return tuple(sorted(guesses, key=lambda guess: -guess.peak_bytes))
