"""The step on real ranks: processes of this machine that exchange tensors by gloo, each with both instruments.

    this process ── forks.py ──▶ rank 0 ┐ gloo     each rank writes its measurement, or its error, into a folder
                             ──▶ rank 1 ┘

`measure_rank` works in any process group, so a program under torchrun may call it as well.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch import distributed
from torch.distributed import _functional_collectives as funcol

from explorer.child_process.forks import Forked
from explorer.engine.bench.recording import recording_of
from explorer.engine.bench.step import run_step, trainee_of
from explorer.engine.device.device import device_of
from explorer.engine.device.subprocess_call import rank_processes, wait_for_ranks
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import blaming
from explorer.engine.ranks.split import check_ranks, mesh_of, split_model
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.watch.collectives import Buckets
from explorer.errors import BadInput, Cancelled, Crashed, message_of
from explorer.record.base import Record, from_json, from_msgpack, to_json, to_msgpack
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.plan import Report, silent
from explorer.record.run import RunSpec

N_WARM = 2
MOST_PROCESSES = 8
"""Real ranks on this machine; more can be predicted."""
LATEST_S = 1.0
"""Longest wait for a result that other code keeps for itself."""
GLOO = "Measured on ranks that exchange by gloo: its own copies inside a collective count as unattributed."
EXCHANGES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
)
"""Functions of torch.distributed that FSDP2 calls and that return when the tensors are exchanged."""
NEEDS = ("torch._dynamo", "explorer.engine.ranks.compare")
Result = TypeVar("Result", bound=Record)


def measure_ranks(spec: RunSpec, report: Report = silent) -> RecordedRanks:
    """The measured step of every rank of `spec.ranks`, each a process. Raises as `run_on_ranks`."""
    assert spec.ranks is not None
    runs = run_on_ranks(measure_rank, spec, Measurement, report)
    return RecordedRanks(ranks=tuple(runs), n_ranks=spec.ranks.n_ranks, recorded_in="")


def run_on_ranks(
    function: Callable[[RunSpec], Result], spec: RunSpec, kind: type[Result], report: Report
) -> list[Result]:
    """`function(spec)` in one process a rank, joined by gloo; the results by rank.

    Raises BadInput for ranks that cannot run here, the first rank's error, Crashed and Cancelled.
    """
    ranks = spec.ranks
    assert ranks is not None
    check_ranks(ranks)
    if spec.device != "cpu" or ranks.n_ranks > MOST_PROCESSES:
        raise BadInput(
            f"{ranks.n_ranks} ranks on {spec.device} were asked for; at most {MOST_PROCESSES} run here, on the CPU.",
            hint="Add --predict, which takes any number of ranks.",
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        call = (folder, function.__module__, function.__name__)
        arguments = [(to_json(spec), rank, *call) for rank in range(ranks.n_ranks)]
        with rank_processes(rank_process, arguments, NEEDS) as processes:
            if not wait_for_ranks(processes, spec.time_limit_s, report):
                raise Cancelled(
                    f"The ranks were not done after {spec.time_limit_s:g} s.", hint="Raise --time-limit, or take less."
                )
            _check_ended(processes, Path(folder))
        return [from_msgpack(_result(Path(folder), rank).read_bytes(), kind) for rank in range(ranks.n_ranks)]


def _check_ended(processes: Sequence[Forked], folder: Path) -> None:
    """Raises Crashed, with the error of the first rank that failed."""
    for rank, process in enumerate(processes):
        if process.ended and process.code != 0:
            error = _result(folder, rank).with_suffix(".error")
            text = error.read_text() if error.exists() else f"The process ended with code {process.code}."
            raise Crashed(f"Rank {rank} failed. {text}", hint="Predict the ranks first: --predict names such errors.")


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.msgpack"


def rank_process(spec_json: bytes, rank: int, folder: str, module: str, function: str) -> None:
    """Body of one rank's process."""
    spec = from_json(spec_json, RunSpec)
    assert spec.ranks is not None
    path = _result(Path(folder), rank)
    try:
        store = f"file://{folder}/store"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=spec.ranks.n_ranks)
        path.write_bytes(to_msgpack(getattr(import_module(module), function)(spec)))
        distributed.barrier()
    except BaseException as error:
        path.with_suffix(".error").write_text(message_of(error))
        os._exit(1)  # threads of the transport would wait for the other ranks
    distributed.destroy_process_group()


@contextmanager
def released_by_gloo() -> Iterator[None]:
    """A wait for a collective also waits until gloo's thread refers to none of its tensors.

    The thread announces a result and lets go of it afterwards: one in seven was held into later operators.
    """
    made: dict[int, weakref.ref[torch.Tensor]] = {}
    """Results by storage. A view may be waited for in the place of the result that gloo holds."""
    wrap, wait = vars(funcol)["_maybe_wrap_tensor"], funcol.wait_tensor

    def wrap_tensor(tensor: torch.Tensor) -> torch.Tensor:
        made[tensor.untyped_storage()._cdata] = weakref.ref(tensor)
        return wrap(tensor)  # type: ignore[no-any-return]

    def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = wait(tensor)
        whole = made.pop(result.untyped_storage()._cdata, lambda: None)()
        _wait_for_release([tensor, result, result if whole is None else whole], [1, 1, 1])
        return result

    def exchanging(function: Callable[..., Any]) -> Callable[..., Any]:
        def exchange(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            counts = list(map(_n_references, tensors))
            work = function(*args, **kwargs)
            if work is None:  # an unfinished one holds its tensors
                _wait_for_release(tensors, counts)
            return work

        return exchange

    changes = [(funcol, "_maybe_wrap_tensor", wrap_tensor), (funcol, "wait_tensor", wait_tensor)]
    changes += [(distributed, name, exchanging(getattr(distributed, name))) for name in EXCHANGES]
    with ExitStack() as undone:
        for module, name, function in changes:
            undone.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)
        yield


def _n_references(tensor: torch.Tensor) -> int:
    return tensor._use_count()  # type: ignore[attr-defined, no-any-return]


def _wait_for_release(tensors: Sequence[torch.Tensor], n_references: Sequence[int]) -> None:
    """Waits until each tensor has no more than `n_references`, Python's counted as one."""
    latest = time.monotonic() + LATEST_S
    while any(_n_references(x) > n for x, n in zip(tensors, n_references)) and time.monotonic() < latest:
        os.sched_yield()


def measure_rank(spec: RunSpec) -> Measurement:
    """The step of this rank, split over the present process group, under both instruments. Nothing is timed."""
    ranks, device = spec.ranks, device_of(torch.device("cpu"))
    assert ranks is not None
    with preserve_global_state(), released_by_gloo():
        torch.set_num_threads(spec.n_threads)
        mesh = mesh_of(ranks, spec.device)
        with Buckets() as buckets:
            trainee = trainee_of(spec, load_for(spec), lambda model: split_model(model, ranks, mesh))
            for _ in range(N_WARM):
                run_step(trainee)
        with blaming(spec.model, trainee.inputs, "step"):
            with recording_of(trainee, device, older=buckets.alive()) as recording:
                loss = run_step(trainee, recording.tracker.on_phase)
            run = recording.measurement(spec)
    rank, n_ranks = distributed.get_rank(), distributed.get_world_size()
    warnings = (*run.warnings, GLOO)
    return replace(run, loss=loss, rank=rank, n_ranks=n_ranks, warnings=warnings)
