"""Rows of a lesson: comparisons of a run with the baseline, their figures, and bars of the distances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from explorer.engine.compare.diffs import Yardstick, difference, differences
from explorer.lab.engine.kit.bench import Gradients, LabBench, Raised, attempt
from explorer.lab.engine.kit.nets import Dropped, blocks_of
from explorer.lab.record import ChartKind, LabChart, LabFigure, LabPart, LabRow, LabSeries, RowOutcome
from explorer.plan.names import some
from explorer.record.comparison import GradientDiff

EQUAL_TENSORS = "equal in every bit"
DISTANCE = "relative distance"
COSINE = "cosine"
NORM_RATIO = "norm ratio"


@dataclass(frozen=True)
class Gap:
    """The distance of a set of gradients from the baseline's, over all parameters together."""

    diffs: tuple[GradientDiff, ...]
    baseline: Gradients = field(repr=False)
    candidate: Gradients = field(repr=False)

    @property
    def outcome(self) -> RowOutcome:
        if any(diff.presence in ("baseline only", "candidate only") for diff in self.diffs):
            return "missing"
        verdicts = {diff.verdict for diff in self.diffs}
        if "different" in verdicts:
            return "different"
        return "rounding" if "rounding" in verdicts else "bitwise equal"

    @property
    def distance(self) -> float | None:
        """|candidate - baseline| / |baseline|, L2; an absent gradient counts as zero. None: all zero."""
        return self._whole.relative_norm

    @cached_property
    def _whole(self) -> GradientDiff:
        """Both sides as one vector; cached_property writes past the frozen dataclass on purpose."""
        pairs = [(self.baseline.get(diff.name), self.candidate.get(diff.name)) for diff in self.diffs]
        left, right = torch.cat([_flat(a, b) for a, b in pairs]), torch.cat([_flat(b, a) for a, b in pairs])
        return difference(GradientDiff, "all of them", left, right, Yardstick())

    def figures(self) -> tuple[LabFigure, ...]:
        n_equal = sum(diff.verdict == "bitwise equal" for diff in self.diffs)
        return (
            counted(EQUAL_TENSORS, n_equal, f"of {len(self.diffs)}"),
            measured(DISTANCE, self.distance),
            measured(COSINE, self._whole.cosine),
            measured(NORM_RATIO, self._whole.norm_ratio),
        )


def _flat(tensor: Tensor | None, other: Tensor | None) -> Tensor:
    """The tensor as a float64 vector; zeros of the length of `other` if the tensor is absent."""
    if tensor is None:
        return torch.zeros(0 if other is None else other.numel(), dtype=torch.float64)
    return tensor.double().flatten()


def gap(baseline: Gradients, candidate: Gradients, reference: Gradients | None = None) -> Gap:
    """Compares tensor by tensor; without a float64 `reference` every difference is "different", never "rounding"."""
    yardstick = Yardstick(reference=reference or {})
    return Gap(differences(GradientDiff, baseline, candidate, yardstick), baseline, candidate)


def measured(name: str, value: bool | int | float | str | None, unit: str = "") -> LabFigure:
    """A figure that was read off a run, not counted."""
    return LabFigure(name=name, value=value, unit=unit, origin="measured")


def counted(name: str, value: bool | int | float | str | None, unit: str = "") -> LabFigure:
    return LabFigure(name=name, value=value, unit=unit)


def baseline_row(label: str, *figures: LabFigure) -> LabRow:
    return LabRow(label=label, outcome="baseline", figures=figures)


def compared_row(
    label: str, baseline: Gradients, tried: Gradients | Raised, *figures: LabFigure, reference: Gradients | None = None
) -> LabRow:
    """A row that says how `tried` compares with `baseline`, or what it raised."""
    if isinstance(tried, Raised):
        return LabRow(label=label, outcome="raised", figures=figures, note=str(tried))
    apart = gap(baseline, tried, reference)
    absent = [diff.name for diff in apart.diffs if diff.presence == "baseline only"]
    note = f"no gradient for {some(absent)}" if absent else ""
    return LabRow(label=label, outcome=apart.outcome, figures=(*apart.figures(), *figures), note=note)


def sides(
    bench: LabBench,
    baseline: tuple[str, Gradients],
    runs: Mapping[str, Callable[[], Gradients]],
    figures: Callable[[Gradients | Raised], Sequence[LabFigure]] = lambda result: (),
) -> tuple[LabRow, ...]:
    """A row for the baseline, and a row for each of `runs`, compared with it; a run may raise.

    `figures` makes the further figures of a row from the result of its run.
    """
    name, expected = baseline
    rows = [baseline_row(name, *figures(expected))]
    for done, (label, run) in enumerate(runs.items()):
        bench.tell(label, done, len(runs))
        result = attempt(run)
        rows.append(compared_row(label, expected, result, *figures(result)))
    return tuple(rows)


def outcome_sentence(row: LabRow, more: str = "") -> str:
    """`Reentrant: no exception, gradients different, off by 0.31 of their size; ...`; `more` comes last."""
    label = f"{row.label[:1].upper()}{row.label[1:]}"
    words = {
        "raised": f"{label} refuses: {row.note}",
        "crashed": f"{label}: {row.note}, without an exception to catch",
        "different": f"{label}: no exception, gradients different, off by {size_of(row)} of their size",
        "missing": f"{label}: no exception, and gradients are missing",
        "rounding": f"{label}: gradients equal up to rounding",
    }.get(row.outcome, f"{label}: gradients {row.outcome}")
    return f"{words}{'; ' if more else ''}{more}."


def chart(
    kind: ChartKind, titles: tuple[str, str, str], x: Iterable[str], series: Iterable[LabSeries], unit: str = ""
) -> LabChart:
    """A chart; `titles`: the question, and the titles of x and y."""
    title, x_title, y_title = titles
    x, series = tuple(x), tuple(series)
    return LabChart(kind=kind, title=title, x_title=x_title, y_title=y_title, x=x, series=series, unit=unit)


def distance_bars(rows: Sequence[LabRow], title: str, x_title: str = "checkpoint") -> LabChart:
    """A bar chart of the distance of each row from the baseline; rows without gradients have no bar."""
    return chart("bars", (title, x_title, DISTANCE), [row.label for row in rows], [series_of(rows, DISTANCE)])


def line(name: str, values: Iterable[float | None], part: LabPart = "other") -> LabSeries:
    """A series of numbers."""
    return LabSeries(name=name, y=tuple(None if value is None else float(value) for value in values), part=part)


def series_of(rows: Sequence[LabRow], figure: str, part: LabPart = "candidate", name: str = "") -> LabSeries:
    """A figure of every row as a series, named after the figure unless `name` is given."""
    return LabSeries(name=name or figure, y=tuple(number(row, figure) for row in rows), part=part)


def number(row: LabRow, name: str) -> float | None:
    """A figure of `row` for a chart or a sentence; None where the row has none."""
    value = row.value(name)
    return None if value is None else float(value)


def size_of(row: LabRow, name: str = DISTANCE) -> str:
    """A figure of `row` as it stands in a sentence."""
    value = number(row, name)
    return "an unknown amount" if value is None else brief(value)


def percent(share: float) -> str:
    """`31.4 %`"""
    return f"{100 * share:.1f} %"


def brief(number: float) -> str:
    """Three digits: `0.314`, `2.3e-08`, and a plain 0 for exactly zero."""
    return "0" if number == 0 else f"{number:.3g}"


N_BLOCKS = 4
MISMATCH = "mask elements that differ"


def agreement(a: Tensor, b: Tensor) -> float:
    """Share of elements that are equal."""
    return float((a == b).double().mean())


def mismatches(model: nn.Sequential) -> list[float]:
    """Share of each block's mask that its rerun drew differently."""
    pairs = [block.dropout.masks for block in blocks_of(model, Dropped)]
    return [float((masks[0] != masks[1]).double().mean()) for masks in pairs]


def mask_rows(shares: list[float]) -> list[LabRow]:
    """A row for the mask of each block."""
    outcomes: list[RowOutcome] = ["bitwise equal" if share == 0 else "different" for share in shares]
    return [
        LabRow(label=f"mask of block{i}", outcome=outcomes[i], figures=(measured(MISMATCH, share, "share"),))
        for i, share in enumerate(shares)
    ]


def chance_of(p: float) -> float:
    """Share of elements in which two independent masks differ."""
    return 2 * p * (1 - p)


def mask_chart(shares: list[float], p: float) -> LabChart:
    """Each block's mismatch beside that of two masks which have nothing to do with each other."""
    drawn = line("rerun against forward", [100 * share for share in shares], "recompute")
    chance = line("two independent masks, 2p(1-p)", [100 * chance_of(p) for _ in shares], "baseline")
    titles = ("How much of each mask did the rerun draw differently?", "block", MISMATCH)
    return chart("bars", titles, [f"block{i}" for i in range(len(shares))], [drawn, chance], "%")
