"""Planners side by side on real steps: who keeps a budget, at which time, with which gradients.

python -m benchmarks.arena sample_models/unet.py --budgets 0.3,0.5,0.7,0.9 --rounds 15 --only greedy,rotor,explorer

Every planner chooses a policy for each budget from one measured step. Equal policies run once. A comparison gives the
peak and the verdict of each policy; then all policies take timed steps in turns in one process. If a planner's run
exceeds the budget, the planner is asked again with the budget lowered by the excess.

A planner is beaten where a rival with equal gradients keeps the same budget and is faster beyond doubt: the interval of
the paired ratios of their steps lies below one with probability BEYOND_DOUBT.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from benchmarks._rotor import HeterogeneousChain, cheapest_schedule
from explorer.engine.bench.bench import bench_of, warm_checkpoint
from explorer.engine.bench.measure import measure
from explorer.engine.bench.step import prepare, torch_device
from explorer.engine.compare.compare import compare
from explorer.engine.device.device import device_of
from explorer.engine.device.memory_limit import without_page_faults
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.policy.apply import apply_policy
from explorer.errors import BadInput
from explorer.plan.names import Fqns
from explorer.plan.planners.planner import Planner
from explorer.plan.policy.counted import counted_units, runs
from explorer.plan.policy.presets import preset
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.sizes import mib
from explorer.record import Measurement, ModelGraph, ModelRef, RunSpec
from explorer.record.measurement import Samples, ratio_with_spread
from explorer.record.policy import KEEP_ALL, Policy, Unit

BEYOND_DOUBT = 0.99
OURS = "explorer"


class Situation:
    """The measured step that every planner plans for. Raises BadInput if nothing is worth recomputing."""

    def __init__(self, run: Measurement, graph: ModelGraph) -> None:
        self.graph = graph
        self.forecaster, self.planner = Forecaster(run, graph), Planner(run, graph)
        self.units = counted_units(graph)
        if not self.units:
            raise BadInput(f"No block of {graph.model.target} is one to recompute by itself.")
        self.costs = {cost.fqn: cost for cost in run.blocks}

    def forward_ms(self, unit: Fqns) -> float:
        return sum(self.costs[fqn].forward.median_ms or 0.0 for fqn in unit)

    def saved_bytes(self, unit: Fqns) -> int:
        return sum(self.graph.by_fqn[fqn].saved_bytes for fqn in unit)

    def cheapest(self, policies: Iterable[Policy], budget_bytes: int) -> Policy:
        """The policy with the lowest predicted time within the budget. Raises BadInput if none is within it."""
        peaks = [(policy, self.forecaster.peak_bytes(policy)) for policy in policies]
        within = [policy for policy, peak in peaks if peak is not None and peak <= budget_bytes]
        if not within:
            least = min((peak for _, peak in peaks if peak is not None), default=None)
            raise BadInput(f"The least that it reaches is {mib(least)}.")
        return min(within, key=lambda policy: self.forecaster.forecast(policy).time_ratio or 1.0)

    def in_segments(self, stretches: Iterable[Fqns]) -> Policy:
        """Each stretch as segments, split where one block does not hand on to the next alone."""
        parts = (runs([(fqn,) for fqn in stretch], self.graph) for stretch in stretches)
        return Policy(units=tuple(Unit(blocks=tuple(f for (f,) in part)) for split in parts for part in split))


Planning = Callable[[Situation, int], Policy]


def every_k(situation: Situation, budget_bytes: int) -> Policy:
    """Every k-th block, for the best k: torchtitan's and Hugging Face's stride."""
    units = situation.units
    policies = (Policy(units=tuple(Unit(blocks=unit) for unit in units[::k])) for k in range(1, len(units) + 1))
    return situation.cheapest((KEEP_ALL, *policies), budget_bytes)


def checkpoint_sequential(situation: Situation, budget_bytes: int) -> Policy:
    """n // s blocks to each of s segments, the rest kept, for the best s: torch.utils.checkpoint."""
    if max(map(len, runs(situation.units, situation.graph))) == 1 and all(len(unit) == 1 for unit in situation.units):
        raise BadInput("No two blocks of this model hand on to each other alone, so it has no segments.")
    blocks = [fqn for unit in situation.units for fqn in unit]
    policies: dict[tuple[Fqns, ...], Policy] = {}
    for n_segments in range(1, len(blocks) + 1):
        size = len(blocks) // n_segments
        stretches = tuple(tuple(blocks[i * size : (i + 1) * size]) for i in range(n_segments - 1))
        policies[stretches] = situation.in_segments(stretches)
    return situation.cheapest(policies.values(), budget_bytes)


def greedy(situation: Situation, budget_bytes: int) -> Policy:
    """Blocks by saved bytes for a millisecond of recompute, until the forecast is within the budget."""
    order = sorted(situation.units, key=lambda u: -situation.saved_bytes(u) / (situation.forward_ms(u) or 1.0))
    for n in range(len(order) + 1):
        chosen = set(order[:n])
        policy = Policy(units=tuple(Unit(blocks=unit) for unit in situation.units if unit in chosen))
        peak = situation.forecaster.peak_bytes(policy)
        if peak is not None and peak <= budget_bytes:
            return policy
    raise BadInput("It found nothing within the budget.")


def rotor(situation: Situation, budget_bytes: int) -> Policy:
    """Rotor's dynamic program (arXiv:1911.13214) on the measured chain of blocks.

    What else the step holds is taken off the budget: the peak with everything kept less what the blocks save. A policy
    cannot nest segments inside segments, so the best schedule without nesting is taken.
    """
    chain = _chain(situation)
    room = budget_bytes - (situation.planner.keep_all_bytes - sum(chain.saved_bytes))
    schedule = cheapest_schedule(chain, room, nested=False)
    if schedule is None:
        raise BadInput(f"It finds no schedule without nested segments in {mib(max(0, room))} of room.")
    return situation.in_segments(
        tuple(fqn for unit in situation.units[piece.first : piece.end] for fqn in unit) for piece in schedule.pieces
    )


def _chain(situation: Situation) -> HeterogeneousChain:
    """Raises BadInput if more than one tensor passes between two blocks. Nothing passes behind the last block."""
    after = {cut.after: cut for cut in situation.graph.cuts}
    outputs = []
    for unit in situation.units:
        cut = after.get(unit[-1])
        if cut is None and unit == situation.units[-1]:
            outputs.append(0)
        elif cut is None or cut.n_tensors != 1:
            crossing = "an unknown number of" if cut is None else str(cut.n_tensors)
            raise BadInput(f"It plans chains, and {crossing} tensors pass behind {unit[-1]}.")
        else:
            outputs.append(cut.n_bytes)
    return HeterogeneousChain(
        forward_ms=tuple(map(situation.forward_ms, situation.units)),
        saved_bytes=tuple(map(situation.saved_bytes, situation.units)),
        output_bytes=tuple(outputs),
    )


PLANNERS: dict[str, Planning] = {
    "every-k": every_k,
    "sqrt": lambda situation, _: preset("sqrt", situation.graph),
    "checkpoint-sequential": checkpoint_sequential,
    "greedy": greedy,
    "rotor": rotor,
    OURS: lambda situation, budget_bytes: situation.planner.within(budget_bytes).policy,
}


@dataclass
class Trial:
    """One planner under one budget, and what real steps said. `why`: the reason it has no policy."""

    planner: str
    share: float
    budget_bytes: int
    policy: Policy | None = None
    why: str = ""
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    verdict: str = ""
    steps: Samples = field(default_factory=Samples)

    @property
    def is_valid(self) -> bool:
        """Whether the run kept the budget with equal gradients."""
        within = self.peak_bytes is not None and self.peak_bytes <= self.budget_bytes
        return within and self.verdict in ("bitwise equal", "rounding")


def trials(spec: RunSpec, shares: Sequence[float], names: Sequence[str], n_rounds: int) -> tuple[Samples, list[Trial]]:
    """Timed steps of everything kept, and every trial of the planners `names` under `shares` of its peak."""
    graph = describe(spec.model)
    situation = Situation(measure(spec), graph)
    whole = situation.planner.keep_all_bytes
    done: dict[Policy, tuple[int | None, str]] = {}
    results = []
    for share in shares:
        for name in names:
            trial = _planned(Trial(name, share, int(share * whole)), situation, int(share * whole))
            _run(trial, spec, done)
            excess = (trial.peak_bytes or 0) - trial.budget_bytes
            if excess > 0:
                again = _planned(Trial(name, share, trial.budget_bytes), situation, trial.budget_bytes - excess)
                if again.policy is not None and again.policy != trial.policy:
                    _run(again, spec, done)
                    trial = again
            results.append(trial)
    ran = [KEEP_ALL, *dict.fromkeys(trial.policy for trial in results if trial.policy is not None)]
    times = in_turns(spec, ran, n_rounds)
    for trial in results:
        if trial.policy is not None:
            trial.steps = times[trial.policy]
    return times[KEEP_ALL], results


def _planned(trial: Trial, situation: Situation, budget_bytes: int) -> Trial:
    try:
        trial.policy = PLANNERS[trial.planner](situation, budget_bytes)
        trial.predicted_bytes = situation.forecaster.peak_bytes(trial.policy)
    except BadInput as error:
        trial.why = error.sentence
    return trial


def _run(trial: Trial, spec: RunSpec, done: dict[Policy, tuple[int | None, str]]) -> None:
    if trial.policy is None:
        return
    if trial.policy not in done:
        comparison = compare(spec, msgspec.structs.replace(spec, policy=trial.policy), full=False)
        done[trial.policy] = (comparison.candidate.step_peak_bytes, comparison.verdict)
    trial.peak_bytes, trial.verdict = done[trial.policy]


def in_turns(spec: RunSpec, policies: Sequence[Policy], n_rounds: int) -> Mapping[Policy, Samples]:
    """`n_rounds` timed steps of each policy, in another order each round, in one process.

    Steps of two processes differ by percents under one policy, so that they cannot be compared.
    """
    device = device_of(torch_device(spec))
    warm_checkpoint(device.torch)
    bench, draw = bench_of(prepare(spec, load_for(spec)), device), random.Random(spec.seed)
    taken: dict[Policy, list[float]] = {policy: [] for policy in policies}
    with without_page_faults():
        bench.take()
        for number in range(1 + n_rounds):
            for policy in draw.sample(policies, len(policies)):
                with apply_policy(bench.model, policy):
                    ms = bench.time()["step"]
                if number:  # the first round warms up
                    taken[policy].append(ms)
    return {policy: Samples(ms=tuple(values)) for policy, values in taken.items()}


def ratio_interval(candidate: Samples, baseline: Samples, sure: float) -> tuple[float, float] | None:
    """The two paired ratios of an interleaved A/B run between which the true median lies, with `sure` or more.

    Holds for any distribution: of n ratios each lies below the median as often as above, so the k-th from either end
    bound it but for twice the chance of fewer than k heads in n throws. None for too few
    pairs: below eight for 0.99. Source: https://en.wikipedia.org/wiki/Sign_test
    """
    pairs = sorted(a / b for a, b in zip(candidate.ms, baseline.ms) if b)
    outside, k = 2.0 ** (1 - len(pairs)), 0
    while outside <= 1 - sure:
        k += 1
        outside += math.comb(len(pairs), k) * 2.0 ** (1 - len(pairs))
    return (pairs[k - 1], pairs[-k]) if k else None


def standing(mine: Trial, other: Trial) -> str:
    """`beaten`, `undecided` or `ahead`, of `mine` beside a rival under the same budget."""
    if mine.policy is None or not other.is_valid or other.policy == mine.policy:
        return "ahead"
    if not mine.is_valid:
        return "beaten"
    ratio = ratio_with_spread(other.steps, mine.steps)
    if ratio is None or ratio[0] >= 1:
        return "ahead"
    interval = ratio_interval(other.steps, mine.steps, BEYOND_DOUBT)
    return "beaten" if interval is not None and interval[1] < 1 else "undecided"


def main() -> None:
    options = _options()
    for target in options.models:
        spec = RunSpec(model=ModelRef(target=target), n_repeats=5)
        shares = [float(share) for share in options.budgets.split(",")]
        names = options.only.split(",") if options.only else list(PLANNERS)
        keep_all, results = trials(spec, shares, names, options.rounds)
        print(f"\n{target}")
        for trial in results:
            print(_line(trial, keep_all))
        for mine in results:
            if mine.planner == OURS:
                said = [f"{standing(mine, o)} by {o.planner}" for o in results if o.share == mine.share]
                worse = [words for words in said if not words.startswith("ahead")]
                print(f"{OURS} at {mine.share:.0%}: {', '.join(worse) or 'not beaten'}")


def _line(trial: Trial, keep_all: Samples) -> str:
    head = f"  {trial.share:4.0%}  {trial.planner:22}"
    if trial.policy is None:
        return f"{head} none: {trial.why}"
    ratio, spread = ratio_with_spread(trial.steps, keep_all) or (float("nan"), float("nan"))
    peaks = f"{mib(trial.peak_bytes):>11} (predicted {mib(trial.predicted_bytes)})"
    return f"{head} {peaks}  time {100 * (ratio - 1):+.1f} ± {100 * spread:.1f} %  {trial.verdict}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arena")
    parser.add_argument(
        "models", nargs="*", default=[f"sample_models/{n}.py" for n in ("gpt", "resnet", "unet", "moe")]
    )
    parser.add_argument("--budgets", default="0.5,0.7")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
