"""Two cuts, and the stages that stand in the graph."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

from tests.ui.page_driver import graph_data
from tests.ui.pipeline.pipeline_driver import (
    GRAPH,
)

CUT = ["blocks.0>blocks.1", "blocks.3>blocks.4"]


def stages_at(at: AppTest) -> list[int]:
    """How many blocks of the chain each stage has."""
    labels = graph_data(at)["labels"]
    stages = [labels[fqn][5] for fqn in GRAPH.chain]
    return [stages.count(stage) for stage in range(max(stages) + 1)]
