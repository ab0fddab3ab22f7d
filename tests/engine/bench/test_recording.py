"""A step is recorded watched and unwatched: the peaks agree, costs add up, and nothing stays behind."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from explorer.engine.bench.measure import measure
from explorer.engine.bench.recording import GRADIENT, record, tag_buckets
from explorer.engine.bench.step import Trainee, prepare
from explorer.engine.device.device import CpuDevice
from explorer.engine.model.load import load
from explorer.engine.watch.storages import NONE, Storages
from explorer.engine.watch.tracker import Tracker
from explorer.record import Policy, RunSpec
from tests.engine.tiny_nets import ref
from tests.zoo import BLOCKS, GPT, gpt_pair


def test_two_instruments_agree() -> None:
    for run in gpt_pair():
        assert run.peaks.alone_peak_bytes == run.step_peak_bytes
        assert run.peaks.tracker_peak_bytes == pytest.approx(run.step_peak_bytes, rel=0.005)


def test_a_layer_that_steps_aside_when_watched_is_told_or_agrees() -> None:
    run = measure(RunSpec(model=ref("attention"), n_repeats=1))
    assert run.step_peak_bytes is not None and run.peaks.alone_peak_bytes is not None
    apart = abs(run.step_peak_bytes - run.peaks.alone_peak_bytes) / run.peaks.alone_peak_bytes
    sentences = [sentence for sentence in run.warnings if "Being watched" in sentence]
    assert bool(sentences) == (apart > 0.005)
    if sentences:
        assert f"{run.peaks.alone_peak_bytes:,}" in sentences[0] and f"{run.step_peak_bytes:,}" in sentences[0]


@pytest.mark.parametrize("seed", range(3))
def test_layers_left_out_by_chance_are_not_taken_for_the_observers_doing(seed: int) -> None:
    """Watched and unwatched step draw the same layers: equal to the byte, and nothing is said."""
    run = measure(RunSpec(model=ref("dropped_layers"), n_repeats=1, seed=seed))
    assert run.step_peak_bytes == run.peaks.alone_peak_bytes
    assert not [sentence for sentence in run.warnings if "Being watched" in sentence]


def test_what_a_recording_leaves_behind_does_not_hold_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a baseline's parameters and gradients would lie in the candidate's total."""
    kept: list[weakref.ref[torch.nn.Module]] = []

    def prepared(*arguments: object) -> Trainee:
        trainee = prepare(*arguments)  # type: ignore[arg-type]
        kept.append(weakref.ref(trainee.model))
        return trainee

    monkeypatch.setattr("explorer.engine.bench.recording.prepare", prepared)
    spec = RunSpec(model=GPT, policy=Policy.recompute(BLOCKS))
    run = record(spec, load(spec.model), CpuDevice(), lambda progress: None)
    gc.collect()
    assert run.allocations is not None
    assert kept and kept[0]() is None


def test_block_costs_add_up_to_the_headlines() -> None:
    for run in gpt_pair():
        root = run.by_fqn[""]
        assert root.at_peak_bytes == run.step_peak_bytes
        assert root.saved_after_forward_bytes == run.saved_after_forward_bytes
        below = [run.by_fqn[fqn] for fqn in BLOCKS]
        assert run.by_fqn["blocks"].saved_after_forward_bytes == sum(cost.saved_after_forward_bytes for cost in below)
        assert run.by_fqn["blocks"].forward_flops == sum(cost.forward_flops for cost in below)


def test_a_block_says_which_blocks_ran_again() -> None:
    baseline, candidate = gpt_pair()
    assert {cost.n_recompute for cost in baseline.blocks} == {0}
    assert [candidate.by_fqn[fqn].n_recompute for fqn in BLOCKS] == [1, 1, 1, 1]
    assert candidate.by_fqn["head"].n_recompute == 0
    for fqn in BLOCKS:
        few, many = candidate.by_fqn[fqn], baseline.by_fqn[fqn]
        assert few.saved_after_forward_bytes < 0.3 * many.saved_after_forward_bytes


def test_early_stop_skips_the_last_product() -> None:
    """Nothing behind the last Linear saves anything when dropout is 0, so its product is not needed again."""
    model = ref("gpt", dropout=0.0)
    skip = measure(RunSpec(model=model, n_repeats=1, policy=Policy.recompute(BLOCKS)))
    last_linear = 2 * 4 * 32 * (4 * 32) * 32
    assert [skip.by_fqn[fqn].skipped_flops for fqn in BLOCKS] == [last_linear] * 4
    assert skip.by_fqn[""].skipped_flops == 4 * last_linear
    assert skip.recompute_flops == sum(skip.by_fqn[fqn].forward_flops for fqn in BLOCKS) - 4 * last_linear
    whole = measure(RunSpec(model=model, n_repeats=1, policy=Policy.recompute(BLOCKS, early_stop=False)))
    assert whole.by_fqn[""].skipped_flops == 0


class Empties(nn.Module):
    """Allocates in forward and holds on to it, as DDP does with its buckets."""

    held: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held = torch.empty(11)
        return x * 2


@pytest.mark.parametrize("wrapped", [True, False])
def test_buckets_are_those_of_the_wrapper_alone(wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Empties())
    if wrapped:
        monkeypatch.setattr("explorer.engine.bench.recording.DistributedDataParallel", Empties)
    tracker = Tracker(model, torch.device("cpu"), [])
    with tracker:
        tracker.on_phase("forward")
        result = model(torch.ones(3))
        tag_buckets(model, tracker)
    seen = tracker.storages
    roles = [seen.role[i] for i, n_bytes in enumerate(seen.n_bytes) if n_bytes == 44]
    assert result.shape == (3,) and roles == [GRADIENT if wrapped else NONE]


def lists_are_gone(seen: Storages) -> bool:
    """Ranks agree on sizes of buckets in lists of one int32; gloo's threads hold them a moment after the forward."""
    lists = [died for n_bytes, died in zip(seen.n_bytes, seen.died_ns) if n_bytes == 4]
    assert lists
    return NONE not in lists


def test_of_ddp_itself() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(3, 5))
        model(torch.ones(2, 3)).sum().backward()
        tracker = Tracker(model, torch.device("cpu"), [])
        with tracker:
            tracker.on_phase("forward")
            model(torch.ones(2, 3))  # the second forward: buckets are built anew
            seen = tracker.storages
            while not lists_are_gone(seen):
                time.sleep(0.001)
            tag_buckets(model, tracker)
        assert sum(n for n, role in zip(seen.n_bytes, seen.role) if role == GRADIENT) == (3 * 5 + 5) * 4
    finally:
        distributed.destroy_process_group()
