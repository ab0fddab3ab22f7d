"""Predicted memory of a step that does not fit, tick by tick, without memory for the parameters.

The tracker sees every operator as in a measured step, but no kernel runs. The allocator reports no events, so the
births and deaths of storages seen by the tracker take their place.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch

from explorer.engine.bench.attribution import attribute
from explorer.engine.bench.block_costs import block_costs, uncounted
from explorer.engine.bench.measure import warm_checkpoint
from explorer.engine.bench.memory import optimizer_tensors
from explorer.engine.bench.recording import tracker_of
from explorer.engine.bench.step import OnPhase, Trainee, gradients, ignore, torch_dtype, trainee_of
from explorer.engine.bench.timeline import as_ints
from explorer.engine.device.allocator import AllocatorLog
from explorer.engine.device.device import device_of
from explorer.engine.device.without_data import cast_buffers, without_data
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import blaming, cast_type, types_of
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import Tracker
from explorer.errors import BadInput
from explorer.record.measurement import Measurement
from explorer.record.plan import Progress, Report, silent
from explorer.record.run import RunSpec

LEFT_OUT = (
    "Predicted: the step was played on tensors without data. What kernels take for themselves is not in it (fused "
    "attention, recurrent layers, convolutions), nor what an allocator rounds or keeps.",
    "Predicted on the CPU's kernels: a GPU may take others, with other saved activations.",
)

CPU_AUTOCAST = (
    "Predicted by the CPU's autocast: CUDA's lists of operators differ, and a GPU was measured to hold up to 12 % more."
)


def measure_without_data(spec: RunSpec, report: Report = silent) -> Measurement:
    """The step of `spec`, of origin predicted. Raises BadInput on CUDA, ModelNotLoaded and ModelFailed."""
    if spec.device != "cpu":
        raise BadInput("A step without data is played on the CPU.", hint="Leave --device out.")
    device = device_of(torch.device("cpu"))

    def cast(own: torch.dtype) -> torch.dtype:
        return cast_type(own, torch_dtype(spec))

    with preserve_global_state(), without_data(cast):
        report(Progress(what="building the model without data", done=0, total=3))
        warm_checkpoint(device.torch)
        loaded = load_for(spec)
        cast_buffers(loaded.model, cast)
        with blaming(spec.model, loaded.inputs, "step without data"):
            trainee = trainee_of(spec, loaded)
            report(Progress(what="playing a step", done=1, total=3))
            _step(trainee, ignore)  # the optimizer makes its state
            report(Progress(what="playing the step under the tracker", done=2, total=3))
            trainee.model.zero_grad(set_to_none=True)
            tracker = tracker_of(trainee)
            with tracker:
                _step(trainee, tracker.on_phase)
                tracker.storages.tag(optimizer_tensors(trainee.model, trainee.optimizer))
        attributed = attribute(_events(tracker), tracker, 0)
    return Measurement(
        spec=spec,
        environment=device.environment(spec.n_threads),
        origin="predicted",
        allocations=attributed.allocations,
        phases=attributed.phases,
        blocks=block_costs(tracker, attributed.allocations, attributed.phases, spec.policy, {}),
        uncounted_ops=uncounted(tracker),
        dtype=types_of(trainee.model),
        warnings=LEFT_OUT if spec.autocast == "none" else (*LEFT_OUT, CPU_AUTOCAST),
    )


def _step(trainee: Trainee, on_phase: OnPhase) -> None:
    """Runs one step like `run_step`, without the loss, which has no value here."""
    gradients(trainee, on_phase)
    if trainee.optimizer is not None:
        on_phase("optimizer")
        trainee.optimizer.step()


def _events(tracker: Tracker) -> AllocatorLog:
    """The step's storages in the form of an allocator's log, each with a unique address."""
    seen = tracker.storages
    seen.pointer = array("q", range(1, len(seen.n_bytes) + 1))
    turns = as_ints(seen.turns)
    number = np.abs(turns) - 1
    inside = number >= seen.n_before_step
    turns, number = turns[inside], number[inside]
    born = turns > 0
    times = np.where(born, as_ints(seen.seen_ns)[number], as_ints(seen.died_ns)[number])
    assert (as_ints(seen.died_ns)[number[~born]] != NONE).all()
    return AllocatorLog(
        time_ns=times,
        pointer=number + 1,
        n_bytes=np.where(born, 1, -1) * as_ints(seen.n_bytes)[number],
    )
