"""A GPT of six layers, and the run that recomputes them all: what words and labels are read of."""

from __future__ import annotations

from explorer.record import Policy, RunSpec
from tests import graphs

GRAPH = graphs.gpt(6)
ALL = [f"blocks.{i}" for i in range(6)]
SPEC = RunSpec(model=GRAPH.model, policy=Policy.recompute(ALL))
