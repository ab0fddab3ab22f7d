"""The measured step as the snapshot file that PyTorch's own memory viewer opens (docs.pytorch.org/memory_viz).

CUDA only: the file is the caching allocator's history with a Python stack for every allocation.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from explorer.engine.device.cuda_allocator import CudaRecorder
from explorer.engine.device.device import device_of
from explorer.engine.measure.limited import run_limited
from explorer.engine.model.loaded import blaming
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.step import prepare, run_step, torch_device
from explorer.errors import NotOnThisDevice, NotSaved
from explorer.record.measurement import SavedFile
from explorer.record.plan import Progress, Report, silent
from explorer.record.run import RunSpec

N_WARM_UP = 2


def save_snapshot(spec: RunSpec, path: Path, report: Report = silent) -> SavedFile:
    """Takes one warm step of `spec` and writes its allocator history to `path`, a few KB an event.

    Raises NotOnThisDevice on a CPU, NotSaved where the file cannot be written, ModelFailed for a model that raises.
    Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """
    if spec.device != "cuda":
        raise NotOnThisDevice(
            f"A snapshot for PyTorch's memory viewer was asked of {spec.device}; only CUDA's allocator has one.",
            hint="The run itself can be saved and opened here on any device.",
        )
    device = torch_device(spec)
    with preserve_global_state():
        trainee, recorder = prepare(spec), CudaRecorder(device, stacks=True)
        with blaming(spec.model, trainee.inputs, "step"):
            for i in range(N_WARM_UP):
                report(Progress(what="warming up", done=i, total=N_WARM_UP + 1))
                run_step(trainee)
            trainee.model.zero_grad(set_to_none=True)
            report(Progress(what="recording the snapshot", done=N_WARM_UP, total=N_WARM_UP + 1))
            with recorder:
                run_limited(device_of(device), trainee)
    try:
        n_bytes = path.write_bytes(pickle.dumps(recorder.snapshot))
    except OSError as error:
        raise NotSaved(f"The snapshot could not be written to {path}: {error.strerror}.") from error
    return SavedFile(path=str(path), n_bytes=n_bytes)
