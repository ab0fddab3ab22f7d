"""A chart as SVG, from the very figure that the page draws: title, legend, axes, marks, and no library to show it.

┌ title, answer ───────────────┐
│ y ┌ plot ──────────────┐     │   the plot is a drawing of its own, so that a zoom moves its window
│   └────────────────────┘ x   │
└ legend ──────────────────────┘
"""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from typing import Any

from explorer.view.drawing.chart import Chart
from explorer.view.drawing.colours import QUIET_TEXT
from explorer.view.report import ink
from explorer.view.report.marks import Drawing, draw_bars, draw_grid, draw_scatter, of_one, placed
from explorer.view.report.scales import Scale, scale_of

WIDTH = 860
_FONT = "font-family:system-ui,sans-serif;font-size:12px"
_ALONE = (
    f".ink{{fill:#1a1c22}}.quiet{{fill:{QUIET_TEXT['light']}}}.grid{{stroke:#8884}}.spread{{stroke:#888;fill:none}}"
    f"@media (prefers-color-scheme:dark){{.ink{{fill:#eee}}.quiet{{fill:{QUIET_TEXT['dark']}}}}}"
)


def svg(chart: Chart) -> str:
    """The picture as a file of its own, with its style and its two grounds' inks."""
    return _Sheet(chart).drawn(alone=True)


def svg_with_hovers(chart: Chart) -> str:
    """The same for a page that has the style, with what a line says under the pointer."""
    sheet = _Sheet(chart)
    drawn = sheet.drawn(alone=False)
    if not sheet.drawing.hovers:
        return drawn
    hovers = json.dumps(sheet.drawing.hovers, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return f'{drawn}<script type="application/json">{hovers}</script>'


class _Sheet:
    """One figure while it is drawn."""

    def __init__(self, chart: Chart) -> None:
        self._chart, self._layout = chart, chart.figure.layout
        traces = list(chart.figure.data)
        self._bars = [trace for trace in traces if trace.type == "bar"]
        self._side_by_side = self._layout.barmode == "group" and len(self._bars) > 1
        x, y = self._scales(traces)
        named = y.names or [words for _, words in y.ticks()]
        longest = max((len(ink.plain(str(name))) for name in named), default=4)
        self._left = min(26 + ink.CHAR * longest, WIDTH / 2.6) if self._shown else 10
        self._right = WIDTH - max(26, float(self._layout.margin.r or 0))
        self._top = 56.0 if self._layout.title.subtitle.text else 38.0
        legend = self._legend(traces)
        self._height = float(self._layout.height or 420)
        self._bottom = self._height - 52 - 18 * len(legend)
        self._legend_rows = legend
        across = x.between(0, self._right - self._left)
        tall = self._bottom - self._top
        self.drawing = Drawing(
            x=across, y=y.between(tall, 0) if not _downward(self._layout.yaxis, y) else y.between(0, tall),
            y2=Scale(low=0, high=1, start=tall, end=0),
        )  # fmt: skip
        for trace in traces:
            if trace.type == "scatter":
                draw_scatter(self.drawing, trace)
            elif trace.type == "bar":
                among = (self._bars.index(trace), len(self._bars)) if self._side_by_side else (0, 1)
                draw_bars(self.drawing, trace, place=among)
            elif trace.type == "heatmap":
                draw_grid(self.drawing, trace)

    @property
    def _shown(self) -> bool:
        return self._layout.yaxis.visible is not False

    def _scales(self, traces: list[Any]) -> tuple[Scale, Scale]:
        own = [trace for trace in traces if trace.yaxis != "y2"]
        along = [value for trace in own if trace.x is not None for value in trace.x]
        along += [shape.x0 for shape in self._layout.shapes if along and not str(shape.xref).endswith("domain")]
        if self._bars and not self._side_by_side:
            along = _ends(self._bars)
        x = scale_of(self._layout.xaxis, along, bars=bool(self._bars))
        y = scale_of(self._layout.yaxis, [value for trace in own if trace.y is not None for value in trace.y])
        marks_only = all(trace.type == "scatter" and (trace.mode or "").startswith("markers") for trace in own)
        if marks_only and self._layout.xaxis.range is None and not x.names:
            x = _roomy(x, 0.03)
        return x, _roomy(y, 0.08) if any(trace.error_y.array is not None for trace in own if marks_only) else y

    def drawn(self, *, alone: bool) -> str:
        """The element."""
        drawing, wide, tall = self.drawing, self._right - self._left, self._bottom - self._top
        legend = self._legend_rows_drawn()
        defs = "".join(drawing.patterns.values())
        style = f"<style>{_ALONE}</style>" if alone else ""
        plot = (
            f'<svg class="plot" x="{self._left:.1f}" y="{self._top:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
            f'viewBox="0 0 {wide:.1f} {tall:.1f}" preserveAspectRatio="none">{"".join(drawing.inside)}</svg>'
        )
        over = f'<g class="over" transform="translate({self._left:.1f},{self._top:.1f})">{"".join(drawing.above)}'
        over += f"{''.join(self._lines())}{''.join(self._notes())}</g>"
        size = f'viewBox="0 0 {WIDTH} {self._height:.0f}" width="{WIDTH}" height="{self._height:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" {size} role="img" style="{_FONT}" '
        named = f'aria-label="{escape(self._chart.alt)}">'
        parts = ["<defs>", defs, "</defs>", style, *self._head(), *self._axes(), plot, over, *legend]
        return f"{head}{named}{''.join(parts)}</svg>"

    def _head(self) -> list[str]:
        title = self._layout.title
        parts = [ink.text(f"<b>{title.text}</b>", 4, 18, class_="ink", font_size=15)]
        if title.subtitle.text:
            parts.append(ink.text(title.subtitle.text, 4, 38, class_="quiet"))
        return parts

    def _axes(self) -> list[str]:
        if not self._shown:
            return []
        drawing, parts = self.drawing, []
        for value, words in drawing.x.ticks():
            if drawing.x.low <= value <= drawing.x.high:
                px = self._left + drawing.x.pixels(value)
                way = f"M{px:.1f},{self._top:.1f}V{self._bottom:.1f}"
                line = f'<path d="{way}" class="grid"/>' if self._layout.xaxis.showgrid is not False else ""
                label = ink.text(words, px, self._bottom + 16, class_="quiet", text_anchor="middle")
                parts.append(f'<g class="tick" data-x="{px - self._left:.1f}">{line}{label}</g>')
        for value, words in drawing.y.ticks():
            if min(drawing.y.low, drawing.y.high) <= value <= max(drawing.y.low, drawing.y.high):
                py = self._top + drawing.y.pixels(value)
                if self._layout.yaxis.showgrid is not False:
                    parts.append(f'<path d="M{self._left:.1f},{py:.1f}H{self._right:.1f}" class="grid"/>')
                short = _cut(words, self._left)
                parts.append(ink.text(short, self._left - 6, py + 4, class_="quiet", text_anchor="end"))
        middle = (self._left + self._right) / 2
        if (words := self._layout.xaxis.title.text) is not None:
            parts.append(ink.text(words, middle, self._bottom + 36, class_="quiet", text_anchor="middle"))
        if (words := self._layout.yaxis.title.text) is not None:
            turned = f"rotate(-90 12 {(self._top + self._bottom) / 2:.1f})"
            at = (self._top + self._bottom) / 2
            parts.append(ink.text(words, 12, at, class_="quiet", text_anchor="middle", transform=turned))
        return parts

    def _lines(self) -> list[str]:
        """Lines across or up the plot."""
        parts = []
        for shape in self._layout.shapes:
            stroke = f'stroke="{shape.line.color}" stroke-width="{shape.line.width}"{ink.dash(shape.line.dash)}'
            if str(shape.xref).endswith("domain"):
                y = self.drawing.y.pixels(float(shape.y0))
                parts.append(f'<path d="M0,{y:.1f}H{self._right - self._left:.1f}" opacity="0.5" {stroke}/>')
            else:
                px = self.drawing.x.pixels(float(shape.x0))
                drawn = f'<path d="M0,0V{self._bottom - self._top:.1f}" {stroke}/>'
                parts.append(
                    f'<g class="at" data-x="{px:.1f}" data-y="0" transform="translate({px:.1f},0)">{drawn}</g>'
                )
        return parts

    def _notes(self) -> list[str]:
        parts = []
        for note in self._layout.annotations:
            y_scale = self.drawing.y2 if note.yref == "y2" else self.drawing.y
            paper = note.xref == "paper"
            px = float(note.x) * (self._right - self._left) if paper else self.drawing.x.at(note.x)
            py = (1 - float(note.y)) * (self._bottom - self._top) if note.yref == "paper" else y_scale.at(note.y)
            px, py = px + float(note.xshift or 0), py - float(note.yshift or 0) + 4
            anchor = "start" if note.xanchor == "left" else "middle"
            colour = {"fill": note.font.color} if note.font.color else {"class_": "ink"}
            words = ink.text(note.text, 0, 0, text_anchor=anchor, **colour)
            parts.append(placed(px, py, words, kind="note" if paper else "at"))
        return parts

    def _legend(self, traces: list[Any]) -> list[list[tuple[str, Any]]]:
        """Names with their traces, in rows that fit."""
        if self._layout.showlegend is False:
            return []
        wanted = [trace for trace in traces if trace.name and trace.showlegend is not False]
        if len(wanted) < 2 and not any(trace.showlegend for trace in wanted):
            return []
        rows: list[list[tuple[str, Any]]] = []
        width = float(WIDTH)
        for trace in wanted:
            wide = 30 + ink.CHAR * len(trace.name)
            if width + wide > WIDTH - 20:
                rows.append([])
                width = 0.0
            rows[-1].append((trace.name, trace))
            width += wide
        return rows

    def _legend_rows_drawn(self) -> list[str]:
        parts = []
        for i, row in enumerate(self._legend_rows):
            x, y = 8.0, self._height - 18 * (len(self._legend_rows) - i) + 8
            for name, trace in row:
                parts += [_sample(self.drawing, trace, x, y), ink.text(name, x + 18, y, class_="ink")]
                x += 30 + ink.CHAR * len(name)
        return parts


def _sample(drawing: Drawing, trace: Any, x: float, y: float) -> str:
    """The mark before a name in the legend."""
    box = f'x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12"'
    if trace.type == "bar":
        shapes = trace.marker.pattern.shape or ""
        shape = shapes if isinstance(shapes, str) else ""
        fill = drawing.paint(of_one(trace.marker.color, 0), shape, trace.marker.pattern.to_plotly_json())
        return f'<rect {box} fill="{fill}"/>'
    if trace.fillcolor:
        fill = drawing.paint(trace.fillcolor, trace.fillpattern.shape or "", trace.fillpattern.to_plotly_json())
        return f'<rect {box} fill="{fill}"/>'
    if (trace.mode or "").startswith("markers"):
        mark = ink.symbol(of_one(trace.marker.symbol, 0) or "circle", 9, of_one(trace.marker.color, 0))
        return f'<g transform="translate({x + 6:.1f},{y - 4:.1f})">{mark}</g>'
    stroke = f'stroke="{trace.line.color}" stroke-width="2"{ink.dash(trace.line.dash)}'
    return f'<path d="M{x:.1f},{y - 4:.1f}h14" {stroke}/>'


def _roomy(scale: Scale, share: float) -> Scale:
    """With room for what sticks out at both ends."""
    room = share * (scale.high - scale.low)
    return replace(scale, low=scale.low - room, high=scale.high + room)


def _ends(bars: list[Any]) -> list[float]:
    """How far each pile of bars reaches, and each bar with a base of its own."""
    piles: dict[str, float] = {}
    ends = []
    for trace in bars:
        for j, (name, value) in enumerate(zip(trace.y, trace.x)):
            if trace.base is not None:
                ends.append(float(trace.base[j]) + (value or 0.0))
            else:
                piles[name] = piles.get(name, 0.0) + (value or 0.0)
    return [*piles.values(), *ends]


def _downward(axis: Any, y: Scale) -> bool:
    return bool(y.names) and axis.autorange == "reversed"


def _cut(words: str, room: float) -> str:
    """A name that fits before the plot: its end says more than its beginning."""
    most = max(int((room - 14) / ink.CHAR), 4)
    return words if len(ink.plain(words)) <= most or "<" in words else f"…{words[-most + 1 :]}"
