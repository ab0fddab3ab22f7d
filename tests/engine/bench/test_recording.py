"""A step is recorded watched and unwatched: what parts the two is said, and nothing stays behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from explorer.engine.bench.measure import measure
from explorer.engine.bench.recording import record
from explorer.engine.bench.step import Trainee, prepare
from explorer.engine.device.device import CpuDevice
from explorer.engine.model.load import load
from explorer.record import Measurement, Policy, RunSpec
from tests.engine.bench.gpt_runs import BLOCKS, GPT
from tests.engine.tiny_nets import ref


def test_two_instruments_agree(pair: tuple[Measurement, Measurement]) -> None:
    for run in pair:
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
