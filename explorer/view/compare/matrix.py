"""The derivative matrix as a picture: one tile a run, its outcome in words and colour."""

from __future__ import annotations

from typing import Any, get_args

import plotly.graph_objects as go

from explorer.record.matrix import CellOutcome, DerivativeCell, DerivativeKind, DerivativeMatrix, Variant
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.colours import VERDICT_COLOURS, translucent
from explorer.view.drawing.figure import empty, figure

QUESTION = "Which derivatives survive which checkpointing?"

VARIANT_TITLES: dict[Variant, str] = {
    "keep": "keep",
    "recompute": "recompute<br>(non-reentrant)",
    "reentrant": "recompute<br>(reentrant)",
    "selective": "selective",
}
OUTCOME_COLOURS: dict[CellOutcome, str] = {
    "bitwise equal": VERDICT_COLOURS["bitwise equal"],
    "rounding": VERDICT_COLOURS["rounding"],
    "different": VERDICT_COLOURS["different"],
    "raises": "#7E62C6",
    "crashes": "#5B3A8E",
    "not run": VERDICT_COLOURS["not comparable"],
}
_LINE = 44
_OPACITY = 0.35


def matrix_chart(matrix: DerivativeMatrix) -> Chart:
    """Which derivative survives which kind of checkpointing."""
    return Chart(
        name="derivatives and checkpointing",
        figure=_picture(matrix),
        alt=f"Grid of outcomes: rows are derivatives, columns are kinds of checkpointing. {_answer(matrix)}.",
        rows=lambda: _rows(matrix),
    )


def _picture(matrix: DerivativeMatrix) -> go.Figure:
    """Rows are derivatives, columns are variants; hover gives the whole sentence. customdata: the cell's sentence."""
    if not matrix.cells:
        return empty(QUESTION, "No derivative was taken.")
    rows = [row for row in get_args(DerivativeKind) if any(cell.derivative == row for cell in matrix.cells)]
    columns = [column for column in get_args(Variant) if any(cell.variant == column for cell in matrix.cells)]
    fig = figure(QUESTION, _answer(matrix), height=130 + 58 * len(rows))
    outcomes = list(OUTCOME_COLOURS)
    grid: list[list[int | None]] = [[None] * len(columns) for _ in rows]
    words: list[list[str]] = [[""] * len(columns) for _ in rows]
    hovers: list[list[str]] = [[""] * len(columns) for _ in rows]
    for cell in matrix.cells:
        i, k = rows.index(cell.derivative), columns.index(cell.variant)
        grid[i][k], words[i][k], hovers[i][k] = outcomes.index(cell.outcome), _words(cell), _wrapped(cell.sentence)
    fig.add_trace(
        go.Heatmap(
            z=grid, x=[VARIANT_TITLES[column] for column in columns], y=rows, zmin=0, zmax=len(outcomes) - 1,
            colorscale=_steps([translucent(OUTCOME_COLOURS[outcome], _OPACITY) for outcome in outcomes]),
            showscale=False, text=words, texttemplate="%{text}", customdata=hovers, xgap=3, ygap=3,
            hovertemplate="<b>%{y}</b>, %{x}<br>%{customdata}<extra></extra>",
        )
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", showgrid=False, type="category")
    fig.update_xaxes(side="top", showgrid=False, type="category")
    fig.update_layout(margin_t=110)
    return fig


def _rows(matrix: DerivativeMatrix) -> list[dict[str, Any]]:
    """One row a cell; an unknown figure stays None."""
    return [
        {
            "derivative": cell.derivative,
            "variant": cell.variant,
            "outcome": cell.outcome,
            "gradients equal": f"{cell.n_equal} of {cell.n_tensors}" if cell.n_tensors else None,
            "relative distance": cell.relative_norm,
            "worst tensor": cell.worst or None,
            "what happened": cell.sentence,
        }
        for cell in matrix.cells
    ]


def _answer(matrix: DerivativeMatrix) -> str:
    tried = [cell for cell in matrix.cells if cell.variant != "keep"]
    equal = sum(cell.outcome == "bitwise equal" for cell in tried)
    silent = sum(cell.outcome == "different" for cell in tried)
    return f"{equal} of {len(tried)} bitwise equal to keep, {silent} different without an error"


def _words(cell: DerivativeCell) -> str:
    if cell.outcome == "different" and cell.relative_norm is not None:
        return f"different, {cell.relative_norm:.2g}"
    if cell.outcome == "raises":
        return f"raises<br>{cell.sentence.partition(':')[0]}"
    return cell.outcome


def _wrapped(text: str) -> str:
    lines = [""]
    for word in text.replace("<", "&lt;").split():
        if len(lines[-1]) + len(word) > _LINE:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines)


def _steps(colours: list[str]) -> list[tuple[float, str]]:
    """A colour scale of flat steps, one an index."""
    n = len(colours)
    return [(edge / n, colour) for i, colour in enumerate(colours) for edge in (i, i + 1)]
