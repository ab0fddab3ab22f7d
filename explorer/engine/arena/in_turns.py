"""Steps of all contestants in turns, in one process: what lies where in a process's memory makes the same step a few
percent longer or shorter, so steps of two processes say less of two policies than steps of one.

try       two steps of each policy, under the limit of memory: who does not fit takes no part
time      a b c, c a b, ... in another order each round, nothing attached
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from explorer.engine.device.device import Device, device_of
from explorer.engine.device.first_step import first_step
from explorer.engine.device.heap import without_page_faults
from explorer.engine.measure.limited import run_limited
from explorer.engine.measure.measure import warm_checkpoint
from explorer.engine.measure.stopwatch import step_ms
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded
from explorer.engine.policy.apply import apply_policy
from explorer.engine.step import Trainee, prepare, torch_device
from explorer.engine.world.as_found import left_as_found
from explorer.record.failure import is_out_of_memory
from explorer.record.policy import Policy
from explorer.record.progress import Progress, Report
from explorer.record.run import RunSpec
from explorer.record.times import Samples

Told = Callable[[int, Sequence[int]], Iterator[int]]
"""The numbers of policies as given, each reported when its turn comes, of a round of that number."""


def timed_in_turns(spec: RunSpec, policies: Sequence[Policy], report: Report) -> tuple[Samples, ...]:
    """By policy `spec.n_repeats` steps, the i-th of all from one round; of one that is out of memory none.

    `spec` keeps everything. Raises what loading the model and its steps raise.
    """
    n_rounds = 2 + spec.n_repeats

    def told(number: int, order: Sequence[int]) -> Iterator[int]:
        for place, i in enumerate(order):
            done, total = number * len(policies) + place, n_rounds * len(policies)
            report(Progress(what=f"timing {len(policies)} policies in turns", done=done, total=total))
            yield i

    with left_as_found(), warnings.catch_warnings(action="ignore"):
        device = device_of(torch_device(spec))
        warm_checkpoint(device.torch)
        loaded = load_for(spec)
        fitting = [i for i in told(0, range(len(policies))) if _fits(device, spec, loaded, policies[i])]
        trainee = prepare(spec, loaded)
        taken = _rounds(device, trainee, policies, fitting, told)
    return tuple(Samples(ms=tuple(taken.get(i, ()))) for i in range(len(policies)))


def _fits(device: Device, spec: RunSpec, loaded: Loaded, policy: Policy) -> bool:
    """Its second step as well: only there has an optimizer its state when forward begins."""
    policed = msgspec.structs.replace(spec, policy=policy)
    try:
        trainee, _ = first_step(device, lambda: prepare(policed, loaded), partial(run_limited, device))
        run_limited(device, trainee)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _rounds(
    device: Device, trainee: Trainee, policies: Sequence[Policy], fitting: Sequence[int], told: Told
) -> Mapping[int, Sequence[float]]:
    clock, draw = device.clock(), random.Random(trainee.spec.seed)
    taken: dict[int, list[float]] = {i: [] for i in fitting}
    with without_page_faults(), device.limited_again(trainee.spec.memory_limit_bytes):
        for number in range(1 + trainee.spec.n_repeats):
            for i in told(1 + number, draw.sample(fitting, len(fitting))):
                with apply_policy(trainee.model, policies[i]):
                    ms = step_ms(trainee, clock)["step"]
                if number:  # the first warms up
                    taken[i].append(ms)
    return taken
