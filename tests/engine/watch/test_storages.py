"""Calls of blocks on the timeline: what each allocated, what went in, what came out."""

from __future__ import annotations

import msgspec
import pytest

from explorer.engine.bench.recording import record
from explorer.engine.device.device import CpuDevice
from explorer.engine.model.load import load
from explorer.engine.state.global_state import preserve_global_state
from explorer.plan.predict.replay import Call, Replay
from explorer.record import Allocations, ModelRef, Policy, RunSpec
from tests.engine.tiny_nets import ref
from tests.view.builders import measured

WIDE = {"width": 64, "length": 64}


def calls_of(policy: Policy | None = None, model: ModelRef | None = None, **options: int) -> tuple[Replay, Allocations]:
    spec = RunSpec(model=model or ref("gpt", **WIDE), policy=policy or Policy(), **options)  # type: ignore[arg-type]
    with preserve_global_state():
        run = record(spec, load(spec.model), CpuDevice(), lambda what: None)
    assert run.allocations is not None and run.failure is None
    replay = Replay.of(msgspec.structs.replace(measured(), allocations=run.allocations, phases=run.phases), None)
    assert replay is not None
    return replay, run.allocations


@pytest.fixture(scope="module")
def gpt() -> tuple[Replay, Allocations]:
    return calls_of()


def test_a_call_lies_inside_its_parents_and_siblings_follow_each_other(gpt: tuple[Replay, Allocations]) -> None:
    calls = gpt[0].calls
    for fqn, own in calls.items():
        parent = fqn.rpartition(".")[0]
        for call in own:
            assert call.first <= call.end
            if parent in calls:
                assert any(outer.first <= call.first and call.end <= outer.end for outer in calls[parent]), fqn
    blocks = [calls[f"blocks.{i}"][0] for i in range(4)]
    assert all(one.end <= other.first for one, other in zip(blocks, blocks[1:]))


def test_what_comes_out_of_a_block_goes_into_the_next(gpt: tuple[Replay, Allocations]) -> None:
    calls = gpt[0].calls
    for i in range(3):
        (out,) = calls[f"blocks.{i}"][0].outputs
        assert calls[f"blocks.{i + 1}"][0].inputs[0] == out


def test_everything_born_in_a_leaf_belongs_to_it(gpt: tuple[Replay, Allocations]) -> None:
    """Second method: the operators' own tags, which do not know of ticks."""
    replay, log = gpt
    for fqn in ("blocks.0.mlp.0", "blocks.2.norm1", "token"):
        (call,) = replay.calls[fqn]
        inside = [i for i in replay.between(call.first, call.end).tolist() if log.ops[log.op[i]]]
        assert inside and {log.blocks[log.block[i]] for i in inside} == {fqn}


def test_every_microbatch_and_every_use_of_a_shared_block_is_a_call() -> None:
    replay, _ = calls_of(n_accumulation=2)
    assert len(replay.calls["blocks.0"]) == 2
    cell, _ = calls_of(model=ModelRef(target="sample_models/recurrent.py", arguments={
        "length": 5, "width": 16, "expansion": 2, "batch": 4, "vocabulary": 8,
    }))  # fmt: skip
    steps: list[Call] = cell.calls["cell"]
    assert len(steps) == 5
    assert all(one.outputs[0] in other.inputs for one, other in zip(steps, steps[1:]))


def test_running_again_is_no_call() -> None:
    blocks = [f"blocks.{i}" for i in range(4)]
    replay, _ = calls_of(Policy.recompute(blocks))
    assert [len(replay.calls[fqn]) for fqn in (*blocks, "blocks.0.qkv", "blocks.3.mlp.2")] == [1] * 6
