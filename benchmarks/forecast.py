"""Error of forecasts: random policies of every kind on each model, forecast and then measured.

python -m benchmarks.forecast [POLICIES A KIND] [KIND ...] [MODEL ...]: 20 of each kind on all sample models take about
five minutes. A MODEL is a sample model, or a word of zoo.txt (`hf:LlamaConfig`, `timm:`); `zoo` is the whole list. A
model whose package is not installed, or that does not run, is named on stderr and left out. Each policy is forecast
three times: from the run that kept everything, from the one that recomputed every block, and from one under a random
policy of its round (flat, nested and segments take turns). Every policy whose peak is off by more than 0.5 % from the
first, and every one whose FLOPs are off, is named on stderr.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence

import msgspec
import torch

from benchmarks.zoo import entries
from explorer.cli.options import ModelOptions
from explorer.engine.bench.attribution import watch_releases, with_releases
from explorer.engine.bench.bench import warm_checkpoint
from explorer.engine.bench.recording import record_step, tracker_of
from explorer.engine.bench.step import prepare, run_step, torch_device
from explorer.engine.device.device import device_of
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import InvalidPolicy, message_of
from explorer.plan.policy.presets import preset
from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Measurement, ModelGraph, ModelRef, RunSpec
from explorer.record.failure import Failure
from explorer.record.policy import Policy
from tests.engine.bench.random_policies import KINDS, random_policy

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

LARGE = 0.005
"""Error of a peak from which on a policy is named."""

Offs = dict[tuple[str, str], list[float]]
"""Relative errors of the peak by source and kind, of the policies that are forecast and whose step runs."""


def main() -> None:
    warnings.simplefilter("ignore")
    words = sys.argv[1:]
    n_policies = int(words.pop(0)) if words and words[0].isdigit() else 20
    kinds = tuple(word for word in words if word in KINDS) or KINDS
    names = [word for word in words if word not in KINDS] or list(MODELS)
    warm_checkpoint(torch.device("cpu"))
    together, n_models = Offs(), 0
    for model in (model for name in names for model in models_of(name)):
        try:
            offs = errors(model, n_policies, kinds)
        except Exception as error:  # a model of other people may fail in any way
            print(f"{model.target}: left out, {message_of(error)[:200]}", file=sys.stderr)
            continue
        n_models += 1
        for key, own in offs.items():
            together.setdefault(key, []).extend(own)
        say(model.target, offs, n_policies)
    say(f"{n_models} models", together, n_policies * n_models)
    misses = [off for own in together.values() for off in own]
    if misses:
        small = sum(off <= LARGE for off in misses)
        print(
            f"{len(misses)} forecasts: median {statistics.median(misses):.4%}, {small / len(misses):.2%} within 0.5 %"
        )


def models_of(word: str) -> list[ModelRef]:
    """The sample model of that name, or the lines of zoo.txt that contain the word, with four rows a batch."""
    if word in MODELS:
        return [ModelRef(target=f"sample_models/{word}.py", size="small", arguments=dict(MODELS[word]))]
    listed = entries([] if word == "zoo" else [word])
    if not listed:
        raise SystemExit(f"{word} is neither a sample model nor a word of zoo.txt.")
    return [ModelOptions(arguments=["batch=4", *entry.arguments]).ref(entry.target) for entry in listed]


def say(what: str, offs: Offs, n_drawn: int) -> None:
    for (source, kind), misses in offs.items():
        line = f"{what}, {kind} from {source}: {len(misses)} of {n_drawn} forecast and run"
        if misses:
            exact = sum(off <= 1e-4 for off in misses)
            line += f", peak off by {statistics.median(misses):.4%} (median), {max(misses):.3%} (worst)"
            line += f", {exact} below 0.01 %"
        print(line, flush=True)


def errors(model: ModelRef, n_policies: int, kinds: Sequence[str]) -> Offs:
    graph = describe(model)
    recorded(RunSpec(model=model))  # the first step of a process has its own libraries to load
    base = recorded(RunSpec(model=model))
    bases = {"keep-all": base}
    with contextlib.suppress(InvalidPolicy):
        bases["all"] = recorded(RunSpec(model=model, policy=preset("all", graph)))
    offs: Offs = {(source, kind): [] for source in SOURCES for kind in kinds}
    for seed in range(n_policies):
        runs = measured(graph, base, seed, kinds)
        if drawn := runs.get(TURNS[seed % len(TURNS)]):
            bases["a random policy"] = drawn
        for source, run in bases.items():
            for kind, off in compared(run, runs, graph):
                offs[source, kind].append(off)
    return offs


def measured(graph: ModelGraph, base: Measurement, seed: int, kinds: Sequence[str]) -> dict[str, Measurement]:
    """By kind the run of its policy number `seed`, where that has units."""
    runs = {}
    for kind in kinds:
        policy = random_policy(kind, graph, base, random.Random(f"{kind}{seed}"))
        if policy.units:
            runs[kind] = recorded(msgspec.structs.replace(base.spec, policy=policy))
    return runs


def compared(source: Measurement, runs: Mapping[str, Measurement], graph: ModelGraph) -> list[tuple[str, float]]:
    """By kind the error of its peak forecast from `source`."""
    baseline = keep_all_from(source, graph)
    if baseline is None:
        return []
    forecaster, misses = Forecaster(baseline, graph), []
    for kind, run in runs.items():
        forecast = forecaster.forecast(run.spec.policy)
        if forecast.step_peak_bytes is None or not run.step_peak_bytes:
            continue
        off = abs(forecast.step_peak_bytes / run.step_peak_bytes - 1)
        misses.append((kind, off))
        if not source.spec.policy.units:
            name_large(
                run, kind, forecast.step_peak_bytes, round((forecast.flop_ratio or 0) * (source.total_flops or 0))
            )
    return misses


def name_large(run: Measurement, kind: str, peak_bytes: int, flops: int) -> None:
    """Prints a policy whose peak or FLOPs are off."""
    peak, ran, name = run.step_peak_bytes or 0, run.total_flops or 0, f"{run.spec.model.target}, {kind}"
    if abs(peak_bytes - peak) > LARGE * peak:
        print(f"{name}: peak {peak_bytes}, measured {peak}: {units_of(run.spec.policy)}", file=sys.stderr)
    if flops and flops != ran:
        print(f"{name}: FLOPs {flops}, counted {ran}: {units_of(run.spec.policy)}", file=sys.stderr)


def units_of(policy: Policy) -> str:
    return " ".join("+".join(unit.blocks) + "".join(f":{op}" for op in unit.save_ops) for unit in policy.units)


def recorded(spec: RunSpec) -> Measurement:
    """The step under both instruments, and nothing else that `measure` does."""
    failures: list[Failure] = []
    with preserve_global_state():
        trainee = prepare(spec, load_for(spec))
        try:
            run_step(trainee)
        except RuntimeError as error:  # kept results that the model writes into
            print(f"{spec.model.target}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
        watched = watch_releases(trainee, tracker_of(trainee))
        recording = record_step(trainee, device_of(torch_device(spec)), failures)
        trainee.handle.undo()
    run = with_releases(recording.measurement(spec), watched)
    return msgspec.structs.replace(run, failure=failures[-1] if failures else None)


if __name__ == "__main__":
    main()
