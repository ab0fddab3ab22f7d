"""SVG's own words: text with Plotly's few tags, patterns that read without colour, symbols."""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any

CHAR = 6.6
"""Width of a letter of 12 pixels, about."""
_TAGS = re.compile(r"(</?(?:b|i|sup|br)\s*/?>)")
_DASHES = {"dot": "2 3", "dash": "6 4", "dashdot": "6 3 2 3"}
_SHAPES = {
    "/": "M-1,{n1} L{n1},-1 M-1,1 L1,-1 M{m1},{n1} L{n1},{m1}",
    "\\": "M-1,-1 L{n1},{n1} M{m1},-1 L{n1},1 M-1,{m1} L1,{n1}",
    "x": "M0,0 L{n},{n} M0,{n} L{n},0",
    "-": "M0,{h} L{n},{h}",
    "|": "M{h},0 L{h},{n}",
    "+": "M0,{h} L{n},{h} M{h},0 L{h},{n}",
}
_SYMBOLS = {
    "diamond": "M0,-{r}L{r},0L0,{r}L-{r},0Z",
    "square": "M-{s},-{s}H{s}V{s}H-{s}Z",
    "x": "M-{s},-{s}L{s},{s}M-{s},{s}L{s},-{s}",
    "cross": "M-{r},0H{r}M0,-{r}V{r}",
    "triangle-up": "M0,-{r}L{r},{s}H-{r}Z",
    "triangle-down": "M0,{r}L{r},-{s}H-{r}Z",
    "pentagon": "M0,-{r}L{r},-{q}L{h},{r}H-{h}L-{r},-{q}Z",
    "hexagon": "M{r},0L{h},{r}H-{h}L-{r},0L-{h},-{r}H{h}Z",
    "hourglass": "M-{s},-{s}H{s}L-{s},{s}H{s}Z",
    "bowtie": "M-{s},-{s}V{s}L{s},-{s}V{s}Z",
    "star": "M0,-{r}L{q},-{q}H{r}L{h},{q}L{s},{r}L0,{h}L-{s},{r}L-{h},{q}L-{r},-{q}H-{q}Z",
}
"""Around the origin; r reaches to the tip, s to a corner, h is half of r and q a third."""


def plain(text: str) -> str:
    """Plotly's text without its tags, a line break for each of its own."""
    return unescape(re.sub(r"<[^>]*>", "", text.replace("<br>", "\n")))


def text(words: str, x: float, y: float, **attributes: str | float) -> str:
    """One `text` element; `<br>` starts a line, `<b>` and `<sup>` are kept."""
    written = "".join(f' {name.rstrip("_").replace("_", "-")}="{value}"' for name, value in attributes.items())
    lines = [_line(line) for line in words.split("<br>")]
    if len(lines) == 1:
        return f'<text x="{x:.1f}" y="{y:.1f}"{written}>{lines[0]}</text>'
    up = y - 7.0 * (len(lines) - 1)
    spans = "".join(f'<tspan x="{x:.1f}" y="{up + 14 * i:.1f}">{line}</tspan>' for i, line in enumerate(lines))
    return f"<text{written}>{spans}</text>"


def _line(words: str) -> str:
    opening = {"<b>": '<tspan font-weight="600">', "<sup>": '<tspan dy="-4" font-size="9">'}
    opening["<i>"] = '<tspan font-style="italic">'
    parts = []
    for part in _TAGS.split(words):
        known = _TAGS.fullmatch(part)
        parts.append(
            "</tspan>" if part.startswith("</") else opening.get(part, "") if known else escape(unescape(part))
        )
    return "".join(parts)


def dash(kind: str | None) -> str:
    """The attribute of a line that is not solid."""
    return f' stroke-dasharray="{_DASHES[kind]}"' if kind in _DASHES else ""


def pattern(shape: str, ground: str, ink: str, size: float) -> tuple[str, str]:
    """(id, definition) of a hatch over a colour; equal ones share an id wherever they stand."""
    name = "h" + re.sub(r"[^0-9a-z]", "", f"{ground}{ink}".lower()) + "".join(f"{ord(letter):x}" for letter in shape)
    n = float(size)
    if shape == ".":
        drawn = f'<circle cx="{n / 2}" cy="{n / 2}" r="{n / 6:.2f}" fill="{ink}"/>'
    else:
        way = _SHAPES[shape].format(n=n, h=n / 2, n1=n + 1, m1=n - 1)
        drawn = f'<path d="{way}" stroke="{ink}" stroke-width="1.2" fill="none"/>'
    box = f'<rect width="{n}" height="{n}" fill="{ground}"/>'
    return name, f'<pattern id="{name}" width="{n}" height="{n}" patternUnits="userSpaceOnUse">{box}{drawn}</pattern>'


def symbol(kind: str, size: float, colour: str) -> str:
    """A marker around the origin."""
    name, is_open = kind.removesuffix("-open"), kind.endswith("-open")
    hollow = is_open or name in ("x", "cross")
    paint = f'fill="none" stroke="{colour}" stroke-width="1.8"' if hollow else f'fill="{colour}"'
    if name not in _SYMBOLS:
        return f'<circle r="{size / 2:.1f}" {paint}/>'
    tip = size / 2 * 1.2
    way = _SYMBOLS[name].format(r=tip, s=size / 2 * 0.9, h=round(tip / 2, 2), q=round(tip / 3, 2))
    return f'<path d="{way}" {paint}/>'


def filled(template: str, custom: Any, place: dict[str, Any]) -> str:
    """A hover text of Plotly's: `%{customdata[2]}`, `%{y}`, `%{x:.2f}`."""

    def value(match: re.Match[str]) -> str:
        field, _, form = match[1].partition(":")
        if field.startswith("customdata"):
            value = custom[int(field[11:-1])] if "[" in field else custom
        else:
            value = place.get(field, "")
        return f"{value:{form}}" if form else str(value)

    return plain(re.sub(r"<extra>.*", "", re.sub(r"%\{([^}]+)\}", value, template)))
