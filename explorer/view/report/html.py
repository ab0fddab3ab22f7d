"""The page of a report: one file without network, with style, script and plotly.js inside.

Each chart is the page's own Plotly figure as JSON. report.js draws a figure when it comes into view.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from explorer.view.drawing.figure import Chart
from explorer.view.graph import browser

MOST_ROWS = 60
"""Rows of a table in a report; the run file has all."""
SENTENCE = 60
"""A cell with more letters keeps a width at which it can be read."""
PLOTLY_FILE = "plotly.min.js"
"""File that the pages of a folder share instead of carrying plotly.js each."""
_HERE = Path(__file__).parent
_EXPLORABLE = ("replay.js", "explorable.js")


def plotly_js() -> str:
    """Source text of plotly.js, about 5 MB, of the installed plotly."""
    return str(get_plotlyjs())


def document(title: str, body: Iterable[str], *, share_plotly: bool = False) -> str:
    """The whole file. With `share_plotly`, plotly.js is loaded from PLOTLY_FILE in the same folder.

    The content security policy admits no request, and only scripts that carry the file's nonce. The nonce is a digest
    of the body: no text in the body can name it, and equal reports are equal files.
    """
    text = "\n".join(body)
    nonce = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32]
    admitted = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; img-src data: blob:"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{admitted}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{(_HERE / 'report.css').read_text()}</style>"
    )
    scripts = ""
    if '<figure class="chart"' in text:
        library = f' src="{PLOTLY_FILE}">' if share_plotly else f">{plotly_js()}"
        script = (_HERE / "report.js").read_text()
        if '<section class="explorable"' in text:
            script = "\n".join((script, _block_graph(), *((_HERE / name).read_text() for name in _EXPLORABLE)))
        scripts = f'<script nonce="{nonce}"{library}</script><script nonce="{nonce}">{script}</script>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{text}{scripts}</body></html>\n'


def _block_graph() -> str:
    """graph.js, a module elsewhere, as a function of this script, and its style."""
    function = browser.as_function(browser.script())
    return f"const blockGraph = {function};\nconst blockGraphStyle = {json.dumps(browser.style())};"


def section(title: str, parts: Iterable[str]) -> str:
    """A heading and its content; empty without content."""
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
    """A figure in large type; `notes` stand below, each with its kind. Empty notes are left out."""
    below = "".join(f'<span class="{kind}">{escape(words)}</span>' for words, kind in notes if words)
    return (
        f'<div class="card" title="{escape(tooltip)}"><span>{escape(label)}</span><b>{escape(value)}</b>{below}</div>'
    )


def drawn(chart: Chart) -> str:
    """The chart and its numbers as a folded table."""
    return f"{picture(chart)}{folded(f'{chart.name} as a table', chart.rows())}"


def picture(chart: Chart) -> str:
    """The chart alone, for places where the page already shows its numbers."""
    figure = chart.plotted().to_plotly_json()
    figure["layout"].pop("template", None)  # 7 KB of defaults; report.js gives the colours of the scheme
    height = float(figure["layout"].get("height", 420))
    text = to_json_plotly(figure).replace("</", "<\\/")
    named = f'role="img" aria-label="{escape(chart.alt)}" data-name="{escape(chart.name.replace(" ", "-"))}"'
    data = f'<script type="application/json">{text}</script>'
    return f'<figure class="chart" {named}><div style="height:{height:.0f}px"></div>{data}</figure>'


def folded(title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """A table that opens by a click; the empty string: no row."""
    if not rows:
        return ""
    name = f"{title[0].upper()}{title[1:]}"
    return f'<details><summary>{escape(name)}</summary><div class="scroll">{table(rows)}</div></details>'


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """A table of at most MOST_ROWS rows, with the number of rows left out."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    cells = (map(_cell, map(row.get, names)) for row in rows[:MOST_ROWS])
    lines = "".join(f"<tr>{''.join(line)}</tr>" for line in cells)
    left = len(rows) - MOST_ROWS
    more = f'<p class="hint">and {left:,} more in the run file</p>' if left > 0 else ""
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide">{body}</div>{more}'


def _cell(value: object) -> str:
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
