"""How well a forecast foresees: random policies of every kind on each sample model, forecast and then measured.

python -m benchmarks.forecast [POLICIES A KIND] [MODEL ...]: 20 of each on all models takes about half an hour.
Offload moves nothing on a CPU, so that a stand-in takes the host's place; the forecast is then that of a GPU.
"""

from __future__ import annotations

import random
import statistics
import sys
import warnings
from collections import defaultdict

import msgspec
import torch
from torch import Tensor

from explorer.engine.device.device import device_of
from explorer.engine.measure.measure import warm_checkpoint
from explorer.engine.measure.recording import Recorded, watched_step
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.policy import offload
from explorer.engine.step import prepare, run_step, torch_device
from explorer.engine.world.as_found import left_as_found
from explorer.plan.forecast.forecast import Forecaster
from explorer.record import Measurement, ModelGraph, ModelRef, RunSpec
from tests.engine.measure.random_policies import KINDS, random_policy

MODELS = {
    "gpt": {"batch": 2, "n_layers": 4},
    "mlp": {"batch": 512, "n_layers": 8},
    "moe": {"batch": 4, "n_layers": 3},
    "recurrent": {"batch": 32, "length": 12},
    "resnet": {"batch": 4},
    "tied_lm": {"batch": 2, "n_layers": 4},
    "unet": {"batch": 2},
    "vit": {"batch": 2, "n_layers": 4},
}


def main() -> None:
    warnings.simplefilter("ignore")
    n_policies = int(sys.argv[1]) if sys.argv[1:] else 20
    warm_checkpoint(torch.device("cpu"))
    together: dict[str, list[float]] = defaultdict(list)
    for name in sys.argv[2:] or MODELS:
        model = ModelRef(target=f"sample_models/{name}.py", size="small", arguments=dict(MODELS[name]))
        graph = describe(model)
        recorded(RunSpec(model=model))  # the first step of a process has its own libraries to load
        base = recorded(RunSpec(model=model))
        for kind in KINDS:
            together[kind] += (offs := errors(kind, n_policies, graph, base))
            say(f"{name}, {kind}", offs, n_policies)
    for kind, offs in together.items():
        say(f"all models, {kind}", offs, n_policies * len(sys.argv[2:] or MODELS))


def say(what: str, offs: list[float], n_drawn: int) -> None:
    line = f"{len(offs)} of {n_drawn} foretold and run"
    if offs:
        exact = sum(off <= 1e-4 for off in offs)
        line += f", peak off by {statistics.median(offs):.4%} (median), {max(offs):.3%} (worst), {exact} below 0.01 %"
    print(f"{what}: {line}", flush=True)


def errors(kind: str, n_policies: int, graph: ModelGraph, base: Measurement) -> list[float]:
    """Relative errors of the peak, of the policies that are foretold and whose step runs."""
    known = base
    if kind == "offload":
        known = msgspec.structs.replace(base, environment=msgspec.structs.replace(base.environment, device="cuda"))
    forecaster, offs = Forecaster(known, graph), []
    for seed in range(n_policies):
        policy = random_policy(kind, graph, base, random.Random(f"{kind}{seed}"))
        foretold = forecaster.forecast(policy).step_peak_bytes
        if not policy.units or foretold is None:
            continue
        on_host = offload.to_host
        if kind == "offload":
            offload.to_host = stand_in
        try:
            run = recorded(msgspec.structs.replace(base.spec, policy=policy))
        finally:
            offload.to_host = on_host
        if run.step_peak_bytes:
            offs.append(abs(foretold / run.step_peak_bytes - 1))
    return offs


def stand_in(tensor: Tensor) -> offload.Back:
    """Memory of numpy's, which torch's allocator does not see."""
    kept = tensor.detach().numpy().copy()
    return lambda: torch.from_numpy(kept).clone()


def recorded(spec: RunSpec) -> Measurement:
    """The step under both instruments, and nothing else that `measure` does."""
    device = device_of(torch_device(spec))
    with left_as_found():
        run, trainee = Recorded(), prepare(spec, load_for(spec))
        try:
            run_step(trainee)
        except RuntimeError as error:  # kept results that the model writes into
            print(f"{spec.model.target}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
        watched_step(run, trainee, device)
        trainee.handle.undo()
    return Measurement(
        spec=spec,
        environment=device.environment(spec.n_threads),
        allocations=run.attribution.allocations if run.attribution else None,
        phases=run.attribution.phases if run.attribution else (),
        failure=run.failure,
    )


if __name__ == "__main__":
    main()
