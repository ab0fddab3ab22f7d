"""The lab: what an experiment asks, which switches it has, and what one real run of it answered.

A lesson is written text; an outcome is computed. Nothing in a lesson states a result.
"""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Origin, Record

RowOutcome = Literal["baseline", "bitwise equal", "rounding", "different", "missing", "raised", "crashed", "shown"]
"""How a row compares with the baseline row. missing: gradients that the baseline has are None; raised: an exception
ended it; crashed: its process died; shown: the row has nothing to compare."""

Theme = Literal["Wrapped blocks", "Segments and gradient stores", "Microbatches and second order", "Traps"]
"""In the order in which they are offered."""


class Choice(Record):
    """One position of a switch."""

    value: str
    label: str
    """What it means, in words for a student."""


class Switch(Record):
    """What can be changed about an experiment."""

    name: str
    question: str
    choices: tuple[Choice, ...]
    """The first one is the default."""

    @property
    def default(self) -> str:
        return self.choices[0].value

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(choice.value for choice in self.choices)

    def label(self, value: str) -> str:
        """Raises StopIteration where `value` is not a choice."""
        return next(choice.label for choice in self.choices if choice.value == value)


class Lesson(Record):
    """One experiment before it ran."""

    name: str
    theme: Theme
    title: str
    question: str
    """The one thing this experiment answers."""
    paragraphs: tuple[str, ...]
    switches: tuple[Switch, ...]
    words: tuple[str, ...] = ()
    """Terms of the glossary that the lesson and its outcome use."""
    takes_model: bool = False
    """Whether a person may name a model for it."""


class LabFigure(Record):
    """One named value of a row. None: not measured, or it does not exist here."""

    name: str
    value: bool | int | float | str | None
    unit: str = ""
    """`bytes`, `FLOPs`, `share` (0 to 1), `of N`, or empty for plain numbers."""
    origin: Origin = "counted"


class LabRow(Record):
    """One run, tensor or block of an experiment."""

    label: str
    outcome: RowOutcome
    figures: tuple[LabFigure, ...] = ()
    note: str = ""
    """The exception's own words, or what to look at."""

    def value(self, name: str) -> bool | int | float | str | None:
        """The figure called `name`; None where the row has none."""
        return next((figure.value for figure in self.figures if figure.name == name), None)


LabPart = Literal["baseline", "candidate", "recompute", "forward", "backward", "other"]


class LabSeries(Record):
    """One line, or one colour of bars. None: nothing to draw there."""

    name: str
    y: tuple[float | None, ...]
    part: LabPart = "other"
    """What it is about: decides its colour, the same one as on every other page."""


class LabChart(Record):
    """The data of one picture. All series share `x`."""

    kind: Literal["bars", "stacked bars", "lines"]
    title: str
    """The question that the picture answers."""
    x_title: str
    y_title: str
    x: tuple[str, ...]
    series: tuple[LabSeries, ...]
    unit: str = ""


class LabOutcome(Record):
    """What one run of an experiment said."""

    experiment: str
    switches: dict[str, str]
    device: str
    rows: tuple[LabRow, ...]
    chart: LabChart
    findings: tuple[str, ...]
    """What to take away: sentences computed from the rows."""
    seconds: float
    printed: str = ""
    """Text the experiment shows as it is, such as a printed model."""

    def row(self, label: str) -> LabRow:
        """Raises KeyError that names the rows there are."""
        for row in self.rows:
            if row.label == label:
                return row
        raise KeyError(f"{label!r} is not among {[row.label for row in self.rows]}")
