"""Models of many blocks: CPU time to read the graph, to record a step, to open the page, and to answer a click.

A chain of layers with three leaves each, of 300, 1,000 and 5,000 blocks in all, is described and measured for real. The
page then runs in Streamlit's AppTest with a worker that knows these answers, so that what is clocked is the server
alone: `opened` is the first visit until the graph and all charts are there, `click` is graph and headline strip (what a
click reruns), `page` the whole page (what another selected block reruns). Planning is left out: it is the worker's.

    python -m benchmarks.many_blocks [CLICKS] [BLOCKS ...]
"""

from __future__ import annotations

import functools
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import streamlit as st
import torch
from streamlit.testing.v1 import AppTest
from torch import nn

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.jobs.protocol import Measure
from explorer.record import Measurement, ModelGraph, ModelRef, RunSpec
from explorer.ui.explore import page
from explorer.ui.session import backend
from tests.ui.fake_worker import FakeJob, FakeWorker
from tests.ui.page_driver import WINDOW, say, settle

ROOT = Path(__file__).resolve().parent.parent
SIZES = (300, 1_000, 5_000)
PER_LAYER = 4
"""Blocks of a layer: itself and three leaves."""


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(self.norm(x)))


def chain(n_blocks: int = 100, width: int = 16) -> tuple[nn.Module, torch.Tensor]:
    """A model of about `n_blocks` blocks, and its batch of shape (8, width)."""
    return nn.Sequential(*(Layer(width) for _ in range(n_blocks // PER_LAYER))), torch.randn(8, width)


class Known(FakeWorker):
    """Answers with the run that was measured; a plan never comes."""

    def __init__(self, graph: ModelGraph, run: Measurement) -> None:
        super().__init__(graph)
        self.run, self.slow_plans = run, True

    def answer(self, job: FakeJob) -> None:
        if isinstance(job.request, Measure):
            job.finish(self.run)
        else:
            super().answer(job)


def main(clicks: str = "7", *sizes: str) -> None:
    torch.set_num_threads(1)  # as a job runs
    logging.getLogger("streamlit.runtime.scriptrunner_utils.script_run_context").disabled = True  # it misses a browser
    print(
        f"{'blocks':>7} {'described':>10} {'recorded':>9} {'opened':>8} {'click':>8} {'page':>8}"
        f"   CPU ms; a click: median of {clicks}"
    )
    figures(SIZES[0], 1)  # what is imported late, and the first call of each kernel, is in no figure
    for n in sizes or SIZES:
        print(figures(int(n), int(clicks)), flush=True)


def figures(n_blocks: int, n_clicks: int) -> str:
    """One row of the table."""
    model = ModelRef(target=f"{__file__}:chain", arguments={"n_blocks": n_blocks})
    graph, described_ms = clocked(lambda: describe(model))
    run, recorded_ms = clocked(lambda: measure(RunSpec(model=model, n_repeats=0)))
    took_ms = visited(graph, run, n_clicks)
    return f"{len(graph.blocks):7,} {described_ms:10.0f} {recorded_ms:9.0f}" + "".join(f" {ms:8.0f}" for ms in took_ms)


def visited(graph: ModelGraph, run: Measurement, n_clicks: int) -> tuple[float, float, float]:
    """CPU milliseconds of the first visit, and of a click: graph and strip alone, and with the whole page (medians)."""
    desk_ms: list[float] = []
    page_ms: list[float] = []
    known = Known(graph, run)
    st.cache_resource.clear()  # the graph of the visit before
    with (
        tempfile.TemporaryDirectory() as home,
        patch.dict("os.environ", CHECKPOINT_EXPLORER_HOME=home),
        patch.object(backend, "worker", lambda: known),
        patch.object(page, "_desk", kept(page._desk, desk_ms)),
    ):
        at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=600)
        at.session_state["window"], at.session_state["plotly"] = WINDOW, True
        at.query_params["model"] = "sample_models/mlp.py"
        _, opened_ms = clocked(lambda: settle(at.run()))
        desk_ms.clear()
        for i in range(n_clicks):
            on = [graph.chain[i]]  # each click a policy that was not asked for yet
            page_ms.append(clocked(lambda on=on: say(at, on=on))[1])
    return opened_ms, statistics.median(desk_ms), statistics.median(page_ms)


def clocked(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and its CPU milliseconds, those of all threads."""
    began = time.process_time()
    result = work()
    return result, (time.process_time() - began) * 1e3


def kept(function: Callable[..., None], took_ms: list[float]) -> Callable[..., None]:
    """`function`, which adds the CPU time of each call to `took_ms`; one that asks for a rerun counts too."""

    @functools.wraps(function)
    def call(*args: object) -> None:
        began = time.process_time()
        try:
            function(*args)
        finally:
            took_ms.append((time.process_time() - began) * 1e3)

    return call


if __name__ == "__main__":
    main(*sys.argv[1:])
