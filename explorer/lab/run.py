"""Runs one experiment of the lab: a real run of seconds, computed anew each time, the world left as it was."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from explorer.engine.world.rng import RngState
from explorer.errors import NotOnThisDevice
from explorer.lab.experts import router_noise
from explorer.lab.kit.bench import Bench, Setting, Shown
from explorer.lab.microbatches import microbatching, second_order
from explorer.lab.randomness import dropout, one_snapshot, own_generators
from explorer.lab.segment_memory import segment_memory
from explorer.lab.skips import nested_skips
from explorer.lab.state import asking_layer, batchnorm, mode_flip
from explorer.lab.stores import gradient_stores, stepping
from explorer.lab.traps import early_stop, gradient_penalty, no_grad_input
from explorer.lab.wrapping import extra_forward, pullback_twice, wrap_in_place
from explorer.plan.lab import settings, story
from explorer.record.lab import LabOutcome
from explorer.record.progress import Report, silent
from explorer.record.run import Device

EXPERIMENTS: dict[str, Callable[[Setting, Bench], Shown]] = {
    "wrap-in-place": wrap_in_place,
    "extra-forward": extra_forward,
    "batchnorm": batchnorm,
    "asking-layer": asking_layer,
    "mode-flip": mode_flip,
    "pullback-twice": pullback_twice,
    "dropout": dropout,
    "one-snapshot": one_snapshot,
    "own-generators": own_generators,
    "gradient-stores": gradient_stores,
    "stepping": stepping,
    "segment-memory": segment_memory,
    "second-order": second_order,
    "microbatching": microbatching,
    "no-grad-input": no_grad_input,
    "gradient-penalty": gradient_penalty,
    "nested-skips": nested_skips,
    "early-stop": early_stop,
    "router-noise": router_noise,
}


def run_lab(name: str, switches: Mapping[str, str], *, device: Device = "cpu", report: Report = silent) -> LabOutcome:
    """Runs the experiment called `name`; switches that are not given stand at their defaults.

    Raises BadInput (unknown experiment, switch or value) and NotOnThisDevice.
    """
    told = story(name)
    setting = settings(told, switches)
    if device == "cuda" and not torch.cuda.is_available():
        raise NotOnThisDevice("The lab was asked to run on CUDA, and torch finds no CUDA device.", hint="Use the CPU.")
    bench = Bench(torch.device(device), report)
    bench.tell(told.title, 0, 1)
    start = time.perf_counter()
    with _left_as_found():
        shown = EXPERIMENTS[name](setting, bench)
    return LabOutcome(
        experiment=name,
        switches=setting,
        device=device,
        rows=shown.rows,
        chart=shown.chart,
        findings=shown.findings,
        printed=shown.printed,
        seconds=time.perf_counter() - start,
    )


@contextmanager
def _left_as_found() -> Iterator[None]:
    """One CPU thread (two round differently from one), warnings unsaid, generators and threads put back afterwards."""
    rng, n_threads = RngState.capture(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(n_threads)
        rng.restore()
