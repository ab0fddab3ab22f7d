"""One run of every kind that has a report of its own."""

from __future__ import annotations

from msgspec.structs import replace

from explorer.record import Failure, Measurement, Policy, RunSpec
from explorer.record.arena import Arena, Bout, Ground
from explorer.record.matrix import DerivativeCell, DerivativeMatrix
from explorer.record.pipeline_run import PipelineRun
from explorer.record.ranks import RecordedRanks
from explorer.view.report.parts import Reported
from tests import graphs, pipelines
from tests.view.builders import HOST, MIB, Chain, measured

GRAPH = graphs.gpt(4)
REFUSED = Failure(kind="out of memory", sentence="The step asked for 8 bytes.", hint="Recompute more.")


def pipelined() -> PipelineRun:
    plan = pipelines.planned(GRAPH)
    spec = RunSpec(model=GRAPH.model, policy=Policy.recompute(["blocks.0", "blocks.2"]), plan=plan)
    return pipelines.ran(GRAPH, spec, n_moved=2)


def matrix() -> DerivativeMatrix:
    cells = (
        DerivativeCell(derivative="backward", variant="keep", outcome="bitwise equal", sentence="As it is."),
        DerivativeCell(
            derivative="backward", variant="reentrant", outcome="raises", sentence="RuntimeError: <b>no</b>"
        ),
    )
    return DerivativeMatrix(spec=RunSpec(model=GRAPH.model), blocks=("blocks.0",), cells=cells)


def arena() -> Arena:
    ran = {"share": 0.5, "budget_bytes": 8 * MIB, "step_peak_bytes": 7 * MIB, "time_ratio_spread": 0.02}
    bouts = (
        Bout(rival="explorer", time_ratio=1.2, verdict="bitwise equal", **ran),
        Bout(rival="greedy", time_ratio=1.4, verdict="different", worst="w: far away", **ran),
        Bout(rival="rotor", share=0.5, why="It plans <i>chains</i>."),
    )
    ground = Ground(peak_bytes=16 * MIB, saved_bytes=9 * MIB, is_measured=True)
    return Arena(spec=RunSpec(model=GRAPH.model), environment=HOST, ground=ground, bouts=bouts)


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
    "pipeline": pipelined(), "matrix": matrix(), "arena": arena(), "ranks": ranks()
}  # fmt: skip
