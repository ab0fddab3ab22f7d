"""Plotly's traces as SVG: stepped lines, areas in a stack, outlines, marks, bars that lie down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from explorer.view.drawing.colours import ON_COLOUR
from explorer.view.report import ink
from explorer.view.report.scales import Scale

MAX_HOVERS = 500
"""Points of a line that answer the pointer."""


@dataclass
class Drawing:
    """What the traces of one figure add up to."""

    x: Scale
    y: Scale
    y2: Scale
    inside: list[str] = field(default_factory=list)
    """Stretches with the picture when somebody zooms."""
    above: list[str] = field(default_factory=list)
    """Keeps its shape: marks, each with its place."""
    patterns: dict[str, str] = field(default_factory=dict)
    hovers: list[list[Any]] = field(default_factory=list)
    """[x in pixels, text], of lines."""
    stacks: dict[str, list[float]] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Where the next bar of a stack starts, by name."""

    def paint(self, colour: str, shape: str, over: dict[str, Any]) -> str:
        """A fill, hatched where the trace has a pattern."""
        if not shape:
            return colour
        name, definition = ink.pattern(shape, colour, over.get("fgcolor") or "white", over.get("size") or 6)
        self.patterns[name] = definition
        return f"url(#{name})"


def draw_scatter(drawing: Drawing, trace: Any) -> None:
    """A line, an area or marks."""
    y = drawing.y2 if trace.yaxis == "y2" else drawing.y
    xs = [] if trace.x is None else [drawing.x.value(value) for value in trace.x]
    ys = [] if trace.y is None else [y.value(value) for value in trace.y]
    if trace.stackgroup:
        _stacked(drawing, trace, [x or 0.0 for x in xs], [value or 0.0 for value in ys])
        return
    mode = trace.mode or "lines"
    if "lines" in mode and xs:
        way = _way(drawing.x, y, xs, ys, stepped=trace.line.shape == "hv")
        if trace.fill == "toself":
            fill = drawing.paint(trace.fillcolor, trace.fillpattern.shape or "", _plain(trace.fillpattern))
            drawing.inside.append(f'<path d="{way}Z" fill="{fill}"/>')
        else:
            width = trace.line.width if trace.line.width is not None else 2
            stroke = f'stroke="{trace.line.color}" stroke-width="{width}"{ink.dash(trace.line.dash)}'
            drawing.inside.append(f'<path d="{way}" fill="none" {stroke}/>')
    if trace.hoverinfo != "skip" and trace.hovertemplate and "lines" in mode:
        drawing.hovers += _hovers(drawing, trace, xs)
    if "markers" in mode and trace.marker.opacity != 0:
        _marks(drawing, trace, y, xs, ys)


def _plain(part: Any) -> dict[str, Any]:
    plain: dict[str, Any] = part.to_plotly_json()
    return plain


def _way(x: Scale, y: Scale, xs: Sequence[Any], ys: Sequence[Any], *, stepped: bool) -> str:
    """A path; None lifts the pen."""
    if stepped:
        return _steps([(x.pixels(left), y.pixels(up)) for left, up in zip(xs, ys) if up is not None])
    parts, down = [], False
    for left, up in zip(xs, ys):
        if left is None or up is None:
            down = False
            continue
        parts.append(f"{'L' if down else 'M'}{x.pixels(left):.1f},{y.pixels(up):.1f}")
        down = True
    return "".join(parts)


def _steps(points: Sequence[tuple[float, float]], *, pen: str = "M") -> str:
    """Along, then up or down; a stretch at one height is one line. Half of a report would be such stretches."""
    if not points:
        return ""
    along, height = f"{points[0][0]:.1f}", f"{points[0][1]:.1f}"
    parts = [f"{pen}{along},{height}"]
    for px, py in points[1:]:
        along, now = f"{px:.1f}", f"{py:.1f}"
        if now != height:
            parts.append(f"H{along}V{now}")
            height = now
    return "".join([*parts, f"H{along}"])


def _stacked(drawing: Drawing, trace: Any, xs: list[float], ys: list[float]) -> None:
    """An area from the top of what lies below to its own; heights hold until the next point."""
    below = drawing.stacks.get(trace.stackgroup, [0.0] * len(xs))
    top = [low + own for low, own in zip(below, ys)]
    drawing.stacks[trace.stackgroup] = top
    along = [drawing.x.pixels(x) for x in xs]
    up = _steps([(px, drawing.y.pixels(height)) for px, height in zip(along, top)])
    # Backwards a height holds from the next point's place to its own.
    lows = [drawing.y.pixels(height) for height in below]
    back = _steps([(along[-1], lows[-1]), *zip(reversed(along[1:]), reversed(lows[:-1])), (along[0], lows[0])], pen="L")
    fill = drawing.paint(trace.fillcolor, trace.fillpattern.shape or "", _plain(trace.fillpattern))
    drawing.inside.append(f'<path d="{up}{back}Z" fill="{fill}"/>')


def _hovers(drawing: Drawing, trace: Any, xs: Sequence[Any]) -> Iterator[list[Any]]:
    every = max(1, -(-len(xs) // MAX_HOVERS))
    for i in range(0, len(xs), every):
        if xs[i] is not None:
            custom = trace.customdata[i] if trace.customdata is not None else ()
            place = {"x": trace.x[i], "y": trace.y[i]}
            yield [round(drawing.x.pixels(xs[i]), 1), ink.filled(trace.hovertemplate, custom, place)]


def _marks(drawing: Drawing, trace: Any, y: Scale, xs: Sequence[Any], ys: Sequence[Any]) -> None:
    marker = trace.marker
    for i, (left, up) in enumerate(zip(xs, ys)):
        if left is None or up is None:
            continue
        kind = of_one(marker.symbol, i) or "circle"
        colour = of_one(marker.color, i) or trace.line.color or "currentColor"
        shape = ink.symbol(kind, marker.size or 6, colour)
        if trace.error_y.array is not None and trace.error_y.array[i]:
            ends = [y.pixels(up + sign * trace.error_y.array[i]) - y.pixels(up) for sign in (-1, 1)]
            shape += f'<path d="M0,{ends[0]:.1f}V{ends[1]:.1f}" class="spread"/>'
        if "text" in trace.mode and trace.text is not None and of_one(trace.text, i):
            shape += ink.text(of_one(trace.text, i), 0, -8, class_="ink", text_anchor="middle")
        px, py = drawing.x.pixels(left), y.pixels(up)
        title = ""
        if trace.hovertemplate:
            custom = trace.customdata[i] if trace.customdata is not None else ()
            title = ink.filled(trace.hovertemplate, custom, {"x": trace.x[i], "y": trace.y[i]})
        drawing.above.append(placed(px, py, f"{_title(title)}{shape}"))


def placed(px: float, py: float, inner: str, *, kind: str = "at") -> str:
    """What keeps its shape and has its place; `note`: a zoom does not move it."""
    at = f'data-x="{px:.1f}" data-y="{py:.1f}" transform="translate({px:.1f},{py:.1f})"'
    return f'<g class="{kind}" {at}>{inner}</g>'


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def draw_bars(drawing: Drawing, trace: Any, *, place: tuple[int, int]) -> None:
    """Lying bars. `place`: this trace among those side by side, and how many there are; (0, 1): they pile up.

    Bars with a base of their own stand there, as thick as they say: the actions of a schedule.
    """
    for j, (name, value) in enumerate(zip(trace.y, trace.x)):
        if value is None:
            continue
        piles = place[1] == 1 and trace.base is None
        start = float(trace.base[j]) if trace.base is not None else drawing.bars[name] if piles else 0.0
        if piles:
            drawing.bars[name] = start + value
        left, right = drawing.x.pixels(start), drawing.x.pixels(start + value)
        top, thick = _row(drawing.y, name, trace.width, place)
        shape, colour = of_one(trace.marker.pattern.shape or "", j), of_one(trace.marker.color, j)
        fill = drawing.paint(colour, shape, _plain(trace.marker.pattern))
        edge = f' stroke="{of_one(trace.marker.line.color, j)}"' if trace.marker.line.color else ""
        faded = f' opacity="{of_one(trace.marker.opacity, j)}"' if trace.marker.opacity is not None else ""
        custom = trace.customdata[j] if trace.customdata is not None else ()
        title = ink.filled(trace.hovertemplate or "", custom, {"x": value, "y": name})
        box = f'x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0):.1f}" height="{thick:.1f}"'
        drawing.inside.append(f'<rect {box} fill="{fill}"{edge}{faded}>{_title(title)}</rect>')
        middle = top + thick / 2
        if trace.error_x.array is not None and trace.error_x.array[j] is not None:
            drawing.inside.append(_spread(drawing.x, start + value, trace.error_x.array[j], middle))
        if trace.text is not None and trace.text[j]:
            if trace.textposition == "inside":
                beside, paint = (left + right) / 2, {"fill": ON_COLOUR, "text_anchor": "middle"}
            else:
                beside, paint = right + 5, {"class_": "ink"}
            drawing.above.append(ink.text(str(trace.text[j]), beside, middle + 4, **paint))


def of_one(given: Any, j: int) -> Any:
    """One for all, or one for each."""
    return given if given is None or isinstance(given, (str, int, float)) else given[j]


def _row(y: Scale, name: Any, width: float | None, place: tuple[int, int]) -> tuple[float, float]:
    """Top and height of a bar."""
    i, n = place
    if width is not None:
        ends = (y.pixels(float(name) - width / 2), y.pixels(float(name) + width / 2))
        return min(ends), abs(ends[1] - ends[0])
    step = abs(y.end - y.start) / max(len(y.names), 1)
    thick = 0.75 * step / n
    return y.at(name) - 0.375 * step + i * thick, thick


def draw_grid(drawing: Drawing, trace: Any) -> None:
    """Tiles with words on them: a heatmap whose numbers count the colours of its scale."""
    wide, tall = drawing.x.pixels(1) - drawing.x.pixels(0), abs(drawing.y.pixels(1) - drawing.y.pixels(0))
    colours = [colour for _, colour in trace.colorscale][::2]
    for i, row in enumerate(trace.z):
        for k, number in enumerate(row):
            if number is None:
                continue
            px, py = drawing.x.pixels(k), drawing.y.pixels(i)
            corner = f'x="{px - wide / 2 + 2:.1f}" y="{py - tall / 2 + 2:.1f}"'
            box = f'{corner} width="{wide - 4:.1f}" height="{tall - 4:.1f}"'
            hover = ink.filled(trace.hovertemplate, trace.customdata[i][k], {"x": trace.x[k], "y": trace.y[i]})
            drawing.inside.append(f'<rect {box} fill="{colours[int(number)]}">{_title(hover)}</rect>')
            drawing.above.append(ink.text(trace.text[i][k], px, py + 4, class_="ink", text_anchor="middle"))


def _spread(x: Scale, value: float, spread: float, y: float) -> str:
    low, high = x.pixels(value - spread), x.pixels(value + spread)
    return f'<path d="M{low:.1f},{y:.1f}H{high:.1f}M{low:.1f},{y - 3:.1f}v6M{high:.1f},{y - 3:.1f}v6" class="spread"/>'
