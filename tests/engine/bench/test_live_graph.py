"""What a recorded step knows of its model is what describing it finds, as far as it goes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import explorer
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.plan.planners.budget import Planner
from explorer.record import Measurement, ModelGraph, ModelRef, Policy

REFS = [
    ModelRef(
        target="sample_models/gpt.py", arguments={"n_layers": 3, "width": 32, "n_heads": 2, "length": 32, "batch": 8}
    ),
    ModelRef(target="sample_models/unet.py"),
]


def recorded(ref: ModelRef, policy: Policy | None = None, n_forwards: int = 1) -> Measurement:
    gc.collect()  # a model that nobody holds any more is held memory all the same
    loaded = load(ref)
    handle = explorer.apply_policy(loaded.model, policy or Policy())
    with explorer.record_step(loaded.model) as run:
        for _ in range(n_forwards):
            loaded.loss(loaded.output()).backward()
    handle.undo()
    return run.measurement


def graph_of(run: Measurement) -> ModelGraph:
    assert run.graph is not None
    return run.graph


@pytest.mark.parametrize("ref", REFS, ids=["gpt", "unet"])
def test_blocks_spine_and_repeats_are_those_of_a_described_model(ref: ModelRef) -> None:
    live, described = graph_of(recorded(ref)), describe(ref)
    assert live.fingerprint == described.fingerprint
    assert (live.chain, live.repeats, live.n_parameters) == (
        described.chain,
        described.repeats,
        described.n_parameters,
    )
    for block in live.blocks:
        same = described.by_fqn[block.fqn]
        for name in ("kind", "n_calls", "forward_flops", "output_bytes", "repeat_of", "own_parameters"):
            assert getattr(block, name) == getattr(same, name), (block.fqn, name)
        assert block.uses_rng == same.uses_rng and block.running_statistics == same.running_statistics
        assert block.saved_bytes == pytest.approx(same.saved_bytes, rel=0.01, abs=1024)


def test_every_block_is_reached_by_an_arrow() -> None:
    graph = graph_of(recorded(REFS[0]))
    reached = {edge.target for edge in graph.edges}
    holders = {block.parent for block in graph.blocks}
    leaves = [block.fqn for block in graph.blocks if block.n_calls and block.fqn not in holders]
    assert set(leaves) - reached == {leaves[0]}


def test_calls_are_those_of_one_forward_where_the_step_has_several() -> None:
    one, two = graph_of(recorded(REFS[0])), graph_of(recorded(REFS[0], n_forwards=2))
    for block in two.blocks:
        assert (block.n_calls, block.forward_flops) == (
            one.by_fqn[block.fqn].n_calls,
            one.by_fqn[block.fqn].forward_flops,
        )
    assert two.edges == one.edges


def test_a_policy_in_force_is_in_the_record_and_plans_start_from_everything_kept() -> None:
    policy = Policy.recompute(["blocks.0", "blocks.1"])
    plain, policed = recorded(REFS[0]), recorded(REFS[0], policy)
    assert policed.spec.policy == policy and not plain.spec.policy.units
    kept, put_together = (Planner(run, graph_of(run)) for run in (plain, policed))
    assert put_together.keep_all_bytes == pytest.approx(kept.keep_all_bytes, rel=0.01)
    assert put_together.floor().step_peak_bytes == pytest.approx(kept.floor().step_peak_bytes, rel=0.01)
    assert kept.floor().step_peak_bytes < kept.keep_all_bytes


def test_autocast_is_noticed_where_the_model_is_called() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with explorer.record_step(model) as run:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(4, 8)).float().sum()
        loss.backward()
    assert run.measurement.spec.autocast == "bfloat16"
