"""Pipelines: how near the prediction comes, and how quick it is.

predict   one change of cut, schedule, microbatches or policy                  asked: <= 50 ms
          and for 100 blocks, 16 stages, 64 microbatches, by schedule
makespan  predicted against rank replay, composed                              asked: within 10 %
memory    predicted peak by rank against replay's

Every timed pass of the profile is followed by one of each replay: the machine's pace drifts, and a ratio of two figures
taken minutes apart would tell of that.

    python -m benchmarks.pipeline [sample_models/gpt.py]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import msgspec
import torch

from explorer.engine.model.describe import describe
from explorer.pipeline.engine.build import build
from explorer.pipeline.engine.in_process import run_pass
from explorer.pipeline.engine.profile import ROUNDS, profile_blocks
from explorer.pipeline.engine.run import compose
from explorer.pipeline.plan.cuts import Stages, atoms, stages_by
from explorer.pipeline.plan.schedules import SCHEDULES
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.record.step import ActionTime, PipelineProfile, RankMemory
from explorer.plan.policy.presets import preset
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.plan import Progress
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan, RunSpec

N_MICROBATCHES = 8
SPLITS = ("1F1B", "Interleaved1F1B")
PRESETS = {"keep-all": ROUNDS[0], "all": ROUNDS[1]}
"""And what the profile says while it measures what a preset does."""


def main(target: str = "sample_models/gpt.py") -> None:
    torch.set_num_threads(1)
    base = RunSpec(model=ModelRef(target=target), optimizer="none")
    graph = describe(base.model)
    stages = stages_by("by-time", graph, 4)
    replays = {name: [Replay(spec_of(base, graph, stages, schedule, name)) for schedule in SPLITS] for name in PRESETS}

    def turn(progress: Progress) -> None:
        for name, told in PRESETS.items():
            for one in replays[name] if progress.what.startswith(told) else ():
                one.time()

    profile = profile_blocks(base, atoms(graph), turn, n_microbatches=N_MICROBATCHES)
    report_speed(profile, stages)
    for name in PRESETS:
        for one in replays[name]:
            one.report(profile, name)


def spec_of(base: RunSpec, graph: ModelGraph, stages: Stages, schedule: str, name: str) -> RunSpec:
    """A run of the preset `name` over four stages."""
    plan = PipelinePlan(stages=stages, n_microbatches=N_MICROBATCHES, schedule=schedule)
    return msgspec.structs.replace(base, policy=preset(name, graph), plan=plan)


class Replay:
    """Every rank of a plan alone, as often as asked."""

    def __init__(self, spec: RunSpec) -> None:
        self.pipeline = build(spec)
        mail = run_pass(self.pipeline, keep_mail=True).mail
        self.turns = [([rank], mail) for rank in range(len(self.pipeline.rows))]
        self.readings: list[ActionTime] = []

    def time(self) -> None:
        for turn in self.turns:
            self.readings += run_pass(self.pipeline, alone=turn).actions

    def report(self, profile: PipelineProfile, name: str) -> None:
        """One line."""
        spec, plan = self.pipeline.spec, self.pipeline.plan
        memory: list[RankMemory] = []
        for turn in self.turns:
            trace = run_pass(self.pipeline, alone=turn, memory=True)
            memory += trace.memory()
        forecast = predict(profile, plan, spec.policy)
        ratio = forecast.makespan_ms / compose(self.pipeline, self.readings).makespan_ms
        print(
            f"{plan.schedule:16s} {name:9s} makespan predicted / replay {ratio:5.3f}   "
            f"predicted peak off replay's {_worst(forecast.memory, memory):.3%}"
        )


def report_speed(profile: PipelineProfile, stages: Stages) -> None:
    """Median CPU time of a prediction: the profiled model, and one of 100 blocks like its second."""
    blocks = tuple(msgspec.structs.replace(profile.blocks[1], blocks=(f"b{k}",)) for k in range(100))
    big = msgspec.structs.replace(profile, blocks=blocks, batch_rows=64, n_rows=1)
    wide = tuple(tuple(f"b{k}" for k in range(j * 100 // 16, (j + 1) * 100 // 16)) for j in range(16))
    for schedule in (name for name, row in SCHEDULES.items() if not row.splits_backward):
        own_ms = _predict_ms(profile, PipelinePlan(stages=stages, n_microbatches=N_MICROBATCHES, schedule=schedule))
        big_ms = _predict_ms(big, PipelinePlan(stages=wide, n_microbatches=64, schedule=schedule))
        print(
            f"predict {schedule:22s} the model, 4 stages, {N_MICROBATCHES} microbatches {own_ms:4.1f} ms   "
            f"100 blocks, 16 stages, 64 microbatches {big_ms:5.1f} ms"
        )


def _predict_ms(profile: PipelineProfile, plan: PipelinePlan) -> float:
    everything = Policy.recompute([fqn for stage in plan.stages for fqn in stage])
    taken = []
    for _ in range(9):
        begun = time.process_time()
        predict(profile, plan, everything)
        taken.append((time.process_time() - begun) * 1e3)
    return statistics.median(taken)


def _worst(memory: Sequence[RankMemory], real: Sequence[RankMemory]) -> float:
    """Largest relative distance of a rank's peak."""
    pairs = [(one.peak_bytes or 0, other.peak_bytes or 0) for one, other in zip(memory, real, strict=True)]
    return max(abs(one - other) / max(other, 1) for one, other in pairs)


if __name__ == "__main__":
    main(*sys.argv[1:])
