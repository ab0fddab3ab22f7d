"""One run of every kind that has a report of its own."""

from __future__ import annotations

from msgspec.structs import replace

from explorer.record import Failure, Measurement, Policy, RunSpec
from explorer.record.measurement import RecordedRanks
from explorer.record.pipeline_run import PipelineRun
from explorer.view.report.parts import Reported
from tests import graphs, pipelines
from tests.view.builders import MIB, Chain, measured

GRAPH = graphs.gpt(4)
REFUSED = Failure(kind="out of memory", sentence="The step asked for 8 bytes.", hint="Recompute more.")


def pipelined() -> PipelineRun:
    plan = pipelines.planned(GRAPH)
    spec = RunSpec(model=GRAPH.model, policy=Policy.recompute(["blocks.0", "blocks.2"]), plan=plan)
    return pipelines.ran(GRAPH, spec, n_moved=2)


def path_of_rank(rank: int, chain: Chain, n_ranks: int = 3, failure: Failure | None = None) -> Measurement:
    return replace(
        measured(chain), origin="recorded", rank=rank, n_ranks=n_ranks, failure=failure, times=None,
        recorded_in=f"train.py, step 2, rank {rank}",
    )  # fmt: skip


def ranks() -> RecordedRanks:
    """Rank 1 was refused, rank 2 left no file."""
    runs = (path_of_rank(0, Chain()), path_of_rank(1, Chain(saved=30 * MIB), failure=REFUSED))
    return RecordedRanks(ranks=runs, n_ranks=3, recorded_in="train.py, step 2")


KINDS: dict[str, Reported] = {
    "pipeline": pipelined(), "ranks": ranks()
}  # fmt: skip
