"""`python -m explorer.jobs.worker --store PATH`: the warm process that holds torch, so that the app need not.

The only file outside the engine that imports it, and late: the pipe is open while torch loads.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from explorer.jobs.protocol import (
    Compare,
    DeriveMatrix,
    Describe,
    DrawAutograd,
    Measure,
    OpenRanks,
    ProfileStages,
    Request,
    RunLab,
    RunPipeline,
    SaveSnapshot,
)
from explorer.jobs.service import Service
from explorer.jobs.store import Store
from explorer.record.base import Record
from explorer.record.progress import Report


def answer(request: Request, report: Report) -> Record:
    """From a request to the engine's verb, with no more memory than the machine has. Raises what the engine raises."""
    from explorer.engine.limits import limited_by_machine

    with limited_by_machine():
        return _answer(request, report)


def _answer(request: Request, report: Report) -> Record:
    match request:
        case Describe():
            from explorer.engine.describe import describe

            return describe(request.model, seed=request.seed, report=report)
        case Measure():
            from explorer.engine.measure import measure

            return measure(request.spec, report)
        case SaveSnapshot():
            from explorer.engine.snapshot import save_snapshot

            return save_snapshot(request.spec, Path(request.path), report)
        case Compare():
            from explorer.engine.compare import compare

            return compare(request.baseline, request.candidate, full=request.full, report=report)
        case DrawAutograd():
            from explorer.engine.autograd import draw_autograd

            return draw_autograd(request.spec, request.block, report)
        case DeriveMatrix():
            from explorer.engine.matrix import derivative_matrix

            return derivative_matrix(request.spec, report)
        case RunLab():
            from explorer.engine.lab.run import run_lab

            return run_lab(request.name, request.switches, device=request.device, report=report)
        case RunPipeline():
            from explorer.engine.pipeline.run import run_pipeline

            return run_pipeline(request.spec, request.engine, report, profile=request.profile)
        case OpenRanks():
            from explorer.engine.pipeline.run import open_results

            return open_results(request.spec, Path(request.folder), report)
        case ProfileStages():
            from explorer.engine.pipeline.profile import profile_blocks

            return profile_blocks(request.spec, request.groups, report, n_microbatches=request.n_microbatches)


def warm_up() -> list[Callable[[], object]]:
    """Imports that the first run would wait for; the first checkpoint call imports torch._dynamo (seconds)."""
    names = ("explorer.engine.describe", "explorer.engine.compare", "torch._dynamo")
    return [partial(importlib.import_module, name) for name in names]


def main() -> None:
    """Serves until stdin ends."""
    parser = argparse.ArgumentParser(prog="python -m explorer.jobs.worker")
    parser.add_argument("--store", type=Path, help="file of the run store; without it nothing is kept")
    arguments = parser.parse_args()
    faulthandler.enable()
    be_first_to_go()
    # cuBLAS reads this once, when CUDA starts; without it equal runs differ.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    store = Store(arguments.store) if arguments.store else None
    Service(answer, store, idle=warm_up(), is_fit=cuda_lives).run()


def cuda_lives() -> bool:
    """False once a kernel went wrong (an index out of range, say): CUDA then refuses this process everything."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def be_first_to_go() -> None:
    """When memory runs out the system shall end this process, not the app."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")


if __name__ == "__main__":
    main()
