"""The page that a report stands on: one file, no network; style and script lie in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from explorer.view.drawing.chart import Chart
from explorer.view.report.svg import svg_with_hovers

MOST_ROWS = 60
"""Rows of a table in a report; the run file has all."""
SENTENCE = 60
"""A cell with more letters keeps a width at which it can be read."""
_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""For the browser: nothing is fetched, whatever a name in a run may say."""


def document(title: str, body: Iterable[str]) -> str:
    """The whole file."""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{(_HERE / 'report.css').read_text()}</style>"
    )
    script = f"<script>{(_HERE / 'report.js').read_text()}</script>"
    text = "\n".join(body)
    body_text = f'<body>{text}<div id="tip"></div>{script}</body>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n{body_text}</html>\n'


def section(title: str, parts: Iterable[str]) -> str:
    """A heading and what stands below it; the empty string where nothing does."""
    text = "\n".join(part for part in parts if part)
    return f'<section id="{anchor(title)}"><h2>{escape(title)}</h2>\n{text}</section>' if text else ""


def anchor(title: str) -> str:
    """The name that a link goes to."""
    return title.lower().replace(" ", "-")


def paragraph(words: str, kind: str = "") -> str:
    """Plain words; line breaks stay."""
    return f'<p class="{kind}">{escape(words)}</p>' if words else ""


def box(words: Sequence[str], kind: str = "") -> str:
    """Paragraphs in a frame."""
    return f'<div class="box {kind}">{"".join(map(paragraph, words))}</div>'


def card(label: str, value: str, tooltip: str, notes: Sequence[tuple[str, str]]) -> str:
    """A figure in large type; `notes` stand below it, each with its kind, and empty ones are left out."""
    below = "".join(f'<span class="{kind}">{escape(words)}</span>' for words, kind in notes if words)
    return (
        f'<div class="card" title="{escape(tooltip)}"><span>{escape(label)}</span><b>{escape(value)}</b>{below}</div>'
    )


def drawn(chart: Chart, *, zooms: bool = False) -> str:
    """The picture and its numbers as a table, folded in."""
    return f"{picture(chart, zooms=zooms)}{folded(f'{chart.name} as a table', chart.rows())}"


def picture(chart: Chart, *, zooms: bool = False) -> str:
    """As `drawn`, where the numbers stand open on the page already."""
    hint = '<p class="hint">Drag over the chart to zoom in, double-click to see all of it.</p>' if zooms else ""
    return f'<figure class="{"zooms" if zooms else ""}">{svg_with_hovers(chart)}</figure>{hint}'


def folded(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table that opens by a click; the empty string: no row."""
    if not rows:
        return ""
    name = f"{title[0].upper()}{title[1:]}"
    return f'<details><summary>{escape(name)}</summary><div class="scroll">{table(rows)}</div></details>'


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """At most MOST_ROWS of them, and how many there are more."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in names)}</tr>" for row in rows[:MOST_ROWS])
    left = len(rows) - MOST_ROWS
    more = f'<p class="hint">and {left:,} more in the run file</p>' if left > 0 else ""
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide">{body}</div>{more}'


def _cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, (int, float)):
        return (
            f'<td class="number">{value:,}</td>' if isinstance(value, int) else f'<td class="number">{value:.4g}</td>'
        )
    words = escape(str(value))
    return f'<td class="sentence">{words}</td>' if len(words) > SENTENCE else f"<td>{words}</td>"
