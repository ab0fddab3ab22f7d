"""The lab: the question of an experiment, its switches, and the outcome of one real run.

A lesson is written text; an outcome is computed. Nothing in a lesson states a result.
"""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Origin, Record

RowOutcome = Literal["baseline", "bitwise equal", "rounding", "different", "missing", "raised", "crashed", "shown"]
"""The result of comparing a row with the baseline row. missing: gradients that the baseline has are None; raised: an
exception ended the row; crashed: its process died; shown: the row has nothing to compare."""

Theme = Literal["Wrapped blocks", "Segments and gradient stores", "Microbatches and second order", "Traps"]
"""Themes in the order of the menu."""


class Choice(Record):
    """A position of a switch."""

    value: str
    label: str
    """The meaning of the choice, in words for a student."""


class Switch(Record):
    """A setting of an experiment."""

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
    """An experiment before it runs."""

    name: str
    theme: Theme
    title: str
    question: str
    paragraphs: tuple[str, ...]
    switches: tuple[Switch, ...]
    words: tuple[str, ...] = ()
    """Terms of the glossary that the lesson and its outcome use."""
    takes_model: bool = False


class LabFigure(Record):
    """A named value of a row. None: not measured, or nonexistent in this row."""

    name: str
    value: bool | int | float | str | None
    unit: str = ""
    """`bytes`, `FLOPs`, `share` (0 to 1), `of N`, or empty for plain numbers."""
    origin: Origin = "counted"


class LabRow(Record):
    """A run, tensor or block of an experiment."""

    label: str
    outcome: RowOutcome
    figures: tuple[LabFigure, ...] = ()
    note: str = ""
    """The message of the exception, or a hint for the reader."""

    def value(self, name: str) -> bool | int | float | str | None:
        """The figure called `name`; None where the row has none."""
        return next((figure.value for figure in self.figures if figure.name == name), None)


LabPart = Literal["baseline", "candidate", "recompute", "forward", "backward", "other"]


class LabSeries(Record):
    """A line of a chart, or one colour of bars. None: nothing to draw at this x."""

    name: str
    y: tuple[float | None, ...]
    part: LabPart = "other"
    """The subject of the series. The subject decides the colour, which is the same on every page."""


ChartKind = Literal["bars", "stacked bars", "lines"]


class LabChart(Record):
    """The data of one picture. All series share `x`."""

    kind: ChartKind
    title: str
    x_title: str
    y_title: str
    x: tuple[str, ...]
    series: tuple[LabSeries, ...]
    unit: str = ""


class LessonPicture(Record):
    """What one run of a lesson with its usual switches showed: for its card."""

    chart: LabChart
    answer: str
    """The last finding of that run, which concludes it."""


class LabOutcome(Record):
    """The results of one run of an experiment."""

    experiment: str
    switches: dict[str, str]
    device: str
    rows: tuple[LabRow, ...]
    chart: LabChart
    findings: tuple[str, ...]
    """Conclusions: sentences computed from the rows."""
    seconds: float
    printed: str = ""
    """Text the experiment shows as it is, such as a printed model."""
