"""Exercises of the page: challenges that a policy solves, and the question what a peak will be.

A challenge is a model, a peak to stay below and a price to pay at most; a real run says whether a policy solves it. The
question has four answers: the forecast is right, and the others are what people usually think.
"""

from __future__ import annotations

from explorer.plan.sizes import mib
from explorer.record.base import Record
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec


class Challenge(Record):
    """A task for a policy. Some policy reached the limits before they were set."""

    name: str
    task: str
    model: ModelRef
    peak_bytes: int
    flop_ratio: float
    """The price is counted, not timed: every machine marks alike."""
    hint: str

    @property
    def baseline(self) -> RunSpec:
        """Untimed: nothing that is marked is a time."""
        return RunSpec(model=self.model, n_repeats=0)


class Marked(Record):
    """A condition of a challenge, and whether the run meets it; None: the run does not show."""

    asked: str
    found: str
    met: bool | None


_GPT = ModelRef(target="sample_models/gpt.py", size="small")
_ROWS = (
    Challenge(
        name="attention",
        task="Fit this GPT into 120 MiB at no more than +15 % arithmetic.",
        model=_GPT,
        peak_bytes=120 * 1024**2,
        flop_ratio=1.15,
        hint="A block need not be recomputed whole: which part of it holds much and is quickly made again? The budget "
        "field alone does not do it: its policy is the fastest within 120 MiB, and here arithmetic is the price.",
    ),
    Challenge(
        name="gpt",
        task="Fit this GPT into 60 MiB at no more than +30 % arithmetic.",
        model=_GPT,
        peak_bytes=60 * 1024**2,
        flop_ratio=1.30,
        hint="Recomputing everything is a little too dear. Which block does backward need first?",
    ),
    Challenge(
        name="resnet",
        task="Fit this ResNet into 40 MiB at no more than +20 % arithmetic, without moving its statistics twice.",
        model=ModelRef(target="sample_models/resnet.py", size="small"),
        peak_bytes=40 * 1024**2,
        flop_ratio=1.20,
        hint="Early blocks hold large pictures. A budget typed above the graph finds the cheapest policy.",
    ),
)
CHALLENGES = {row.name: row for row in _ROWS}


def is_about(challenge: Challenge, run: Comparison) -> bool:
    """True if `run` compares a policy on the model of the challenge with keeping everything."""
    return run.candidate.spec.model == challenge.model and run.baseline.spec.model == challenge.model


def marks(challenge: Challenge, run: Comparison) -> tuple[Marked, ...]:
    """Peak and verdict as `run` measured them, and the arithmetic that it counted."""
    peak, ratio = run.candidate.step_peak_bytes, run.headlines()["flop_ratio"]
    return (
        Marked(
            asked=f"step peak at most {mib(challenge.peak_bytes)}",
            found="not measured" if peak is None else mib(peak),
            met=None if peak is None else peak <= challenge.peak_bytes,
        ),
        Marked(
            asked=f"arithmetic at most ×{challenge.flop_ratio:.2f}",
            found="not counted" if ratio is None else f"×{ratio:.3f}",
            met=None if ratio is None else ratio <= challenge.flop_ratio,
        ),
        Marked(
            asked="the same gradients and state",
            found=run.verdict,
            met=run.verdict in ("bitwise equal", "rounding"),
        ),
    )


_APART = 0.05
"""Answers that lie closer to another than this share of the right one are left out."""


class Guess(Record):
    """An answer, and the reason why it is right or wrong."""

    peak_bytes: int
    because: str
    right: bool = False


def peak_guesses(peak_bytes: int, saved_bytes: int, foreseen_bytes: int) -> tuple[Guess, ...]:
    """The answers, largest first, from peak and saved bytes of the keep-all run and from the predicted peak."""
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
