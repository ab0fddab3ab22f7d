"""A record of each kind that has a report of its own, its report as text, and the figures in it."""

from __future__ import annotations

import json
import pickle
import re
from functools import cache
from typing import Any

from msgspec.structs import replace

from explorer import slices
from explorer.plan.card.opened import open_history
from explorer.record import Failure, Measurement
from explorer.record.measurement import RecordedRanks
from explorer.view.report.html import plotly_js
from explorer.view.report.report import Reported, ReportOf, report_text
from tests import graphs
from tests.plan.card.histories import framed_document
from tests.view.builders import MIB, Chain, measured

GRAPH = graphs.gpt(4)
REFUSED = Failure(kind="out of memory", sentence="The step asked for 8 bytes.", hint="Recompute more.")


def of_rank(rank: int, chain: Chain, n_ranks: int = 3, failure: Failure | None = None) -> Measurement:
    return replace(
        measured(chain), origin="recorded", rank=rank, n_ranks=n_ranks, failure=failure, times=None,
        recorded_in=f"train.py, step 2, rank {rank}",
    )  # fmt: skip


def ranks() -> RecordedRanks:
    """Rank 1 was refused, rank 2 left no file."""
    runs = (of_rank(0, Chain()), of_rank(1, Chain(saved=30 * MIB), failure=REFUSED))
    return RecordedRanks(ranks=runs, n_ranks=3, recorded_in="train.py, step 2")


KINDS: dict[str, Reported] = {
    "ranks": ranks(), "history": open_history(pickle.dumps(framed_document()), "a.pickle")
}  # fmt: skip
if "pipeline" in slices.names():
    from tests.pipeline.pipelines import of_report

    KINDS["pipeline"] = of_report(GRAPH)


MOST_BYTES = 4 * 1024**2
"""Of a report besides plotly.js."""
_FIGURE = re.compile(
    r'<figure class="chart" role="img" aria-label="(?P<alt>[^"]*)" data-name="(?P<name>[^"]*)">'
    r'<div[^>]*></div><script type="application/json">(?P<figure>.*?)</script></figure>',
    re.S,
)


@cache
def text_of(kind: str) -> str:
    return besides_plotly(
        report_text(ReportOf(run=KINDS[kind], name=f"a {kind}", graph=GRAPH if kind == "pipeline" else None))
    )


def besides_plotly(text: str) -> str:
    return text.replace(plotly_js(), "")


def besides_figures(text: str) -> str:
    return _FIGURE.sub("", besides_plotly(text))


def figures_in(text: str) -> dict[str, dict[str, Any]]:
    """Name of each chart in a report, and its figure as the browser reads it."""
    return {found["name"]: json.loads(found["figure"]) for found in _FIGURE.finditer(text)}


def of(run: Reported) -> ReportOf:
    return ReportOf(run=run, name="gpt, every second", created=1e9)
