"""How well a forecast foresees: random policies of every kind on each sample model, forecast and then measured.

python -m benchmarks.forecast [POLICIES A KIND] [MODEL ...]: 20 of each on all models takes about five minutes.
Each is forecast three times: from the run that kept everything, from the one that recomputed every block, and from one
under a random policy of its round (flat, nested and segments take turns).
Offload moves nothing on a CPU, so that a stand-in takes the host's place; the forecast is then that of a GPU.
"""

from __future__ import annotations

import random
import statistics
import sys
import warnings
from collections.abc import Mapping

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
from explorer.plan.forecast.keep_all import keep_all_from
from explorer.plan.policy.presets import preset
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
TURNS = ("flat", "nested", "segments")
"""Kinds of policies whose runs are baselines as well; they come first in KINDS."""
SOURCES = ("keep-all", "all", "a random policy")

Offs = dict[tuple[str, str], list[float]]
"""Relative errors of the peak by source and kind, of the policies that are foretold and whose step runs."""


def main() -> None:
    warnings.simplefilter("ignore")
    n_policies = int(sys.argv[1]) if sys.argv[1:] else 20
    warm_checkpoint(torch.device("cpu"))
    names, together = sys.argv[2:] or list(MODELS), Offs()
    for name in names:
        offs = errors(name, n_policies)
        for key, own in offs.items():
            together.setdefault(key, []).extend(own)
        say(name, offs, n_policies)
    say("all models", together, n_policies * len(names))


def say(what: str, offs: Offs, n_drawn: int) -> None:
    for source in SOURCES:
        for kind in KINDS:
            misses = offs[source, kind]
            line = f"{what}, {kind} from {source}: {len(misses)} of {n_drawn} foretold and run"
            if misses:
                exact = sum(off <= 1e-4 for off in misses)
                line += f", peak off by {statistics.median(misses):.4%} (median), {max(misses):.3%} (worst)"
                line += f", {exact} below 0.01 %"
            print(line, flush=True)


def errors(name: str, n_policies: int) -> Offs:
    model = ModelRef(target=f"sample_models/{name}.py", size="small", arguments=dict(MODELS[name]))
    graph = describe(model)
    recorded(RunSpec(model=model))  # the first step of a process has its own libraries to load
    base = recorded(RunSpec(model=model))
    known = {"keep-all": base, "all": recorded(RunSpec(model=model, policy=preset("all", graph)))}
    offs: Offs = {(source, kind): [] for source in SOURCES for kind in KINDS}
    for seed in range(n_policies):
        runs = measured(graph, base, seed)
        if drawn := runs.get(TURNS[seed % len(TURNS)]):
            known["a random policy"] = drawn
        for source, run in known.items():
            for kind, off in compared(run, runs, graph):
                offs[source, kind].append(off)
    return offs


def measured(graph: ModelGraph, base: Measurement, seed: int) -> dict[str, Measurement]:
    """By kind the run of its policy number `seed`, where that has units."""
    runs = {}
    for kind in KINDS:
        policy = random_policy(kind, graph, base, random.Random(f"{kind}{seed}"))
        if not policy.units:
            continue
        on_host = offload.to_host
        if kind == "offload":
            offload.to_host = stand_in
        try:
            runs[kind] = recorded(msgspec.structs.replace(base.spec, policy=policy))
        finally:
            offload.to_host = on_host
    return runs


def compared(source: Measurement, runs: Mapping[str, Measurement], graph: ModelGraph) -> list[tuple[str, float]]:
    """By kind the error of its peak foretold from `source`."""
    baseline = keep_all_from(source, graph)
    if baseline is None:
        return []
    as_gpu = msgspec.structs.replace(baseline, environment=msgspec.structs.replace(baseline.environment, device="cuda"))
    on_cpu, on_gpu, misses = Forecaster(baseline, graph), Forecaster(as_gpu, graph), []
    for kind, run in runs.items():
        foretold = (on_gpu if kind == "offload" else on_cpu).peak_bytes(run.spec.policy)
        if foretold is not None and run.step_peak_bytes:
            misses.append((kind, abs(foretold / run.step_peak_bytes - 1)))
    return misses


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
