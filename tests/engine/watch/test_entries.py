"""What a block's code reads at its entry: any difference between forward and recompute is found, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.compare.compare import compare
from explorer.engine.model.describe import describe, describe_loaded
from explorer.engine.model.loaded import Loaded
from explorer.engine.policy.apply import apply_policy
from explorer.engine.watch.entries import EntryWatch
from explorer.plan.hazards.hazards import hazards
from explorer.record.graph import ModelRef
from explorer.record.late_read import LateRead
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.engine import hidden_nets, reading_nets

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
POLICIES = {
    "each": Policy.recompute(BLOCKS),
    "segment": Policy.recompute([tuple(BLOCKS)]),
    "reentrant": Policy.recompute(BLOCKS, use_reentrant=True),
    "to the end": Policy.recompute(BLOCKS, early_stop=False),
}


def reads(kind: str, policy: Policy) -> Sequence[LateRead]:
    """The late reads of the second step."""
    torch.manual_seed(0)
    model, (x, y), loss = reading_nets.net(kind)
    watch = EntryWatch(model)
    with apply_policy(model, policy), watch.watching(), contextlib.suppress(torch.utils.checkpoint.CheckpointError):
        for _ in range(2):
            watch.reads.clear()
            loss(model(x.requires_grad_()), y).backward()
    return list(watch.reads.values())


def dry(model: nn.Module, x: Tensor) -> tuple[set[str], list[str]]:
    """Traits and late reads of a described model, without any policy."""
    loaded = Loaded(ModelRef(target="net.py"), model, (x,), (), lambda output, _: reading_nets.counting_loss(output, x))
    blocks = describe_loaded(loaded, lambda: loaded, "cpu").blocks
    return {trait for block in blocks for trait in block.traits}, [read for b in blocks for read in b.late_reads]


@pytest.mark.parametrize("kind", reading_nets.LATE)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_value_that_changed_between_forward_and_recompute_is_named(kind: str, policy: str) -> None:
    late, name = reads(kind, POLICIES[policy]), reading_nets.LATE[kind][1]
    if (kind, policy) == ("package_counts_behind_the_last_saved_tensor", "to the end"):
        pytest.skip("the recompute counts too: state that moves twice")
    assert late and any(name in f"{read.owner} {read.name}" for read in late), [read.sentence for read in late]
    assert all(read.in_forward != read.in_recompute for read in late)
    model, (x, _), _ = reading_nets.net(kind)
    assert kind == "backward_hook_counts" or any(name in read for read in dry(model, x)[1])


@pytest.mark.parametrize("kind", reading_nets.HARMLESS)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_no_code_reads_is_no_finding(kind: str, policy: str) -> None:
    assert not reads(kind, POLICIES[policy])
    model, (x, _), _ = reading_nets.net(kind)
    traits, _ = dry(model, x)
    assert traits.isdisjoint({"departs", "reads_late", "moves_shared"})
    assert kind != "losses_in_a_new_list" or "moves_attributes" not in traits


@pytest.mark.parametrize("kind", ["guarded", "guarded_count", "guarded_by_graph_task", "guarded_by_stack"])
def test_code_that_guards_itself_is_no_finding(kind: str) -> None:
    model, x = hidden_nets.net(kind)
    watch = EntryWatch(model)
    with apply_policy(model, Policy.recompute(["0", "1", "2"])), watch.watching():
        for _ in range(2):
            watch.reads.clear()
            model(x).sum().backward()
    assert not watch.reads
    assert dry(*hidden_nets.net(kind))[0].isdisjoint({"departs", "reads_late", "moves_shared"})


@pytest.mark.parametrize("kind", ["root_counts", "package_counts_behind_the_last_saved_tensor"])
def test_a_comparison_is_not_green(kind: str) -> None:
    """Two steps are equal, and the verdict is not about them alone."""
    spec = RunSpec(model=reading_nets.ref(kind), n_repeats=0)
    comparison = compare(spec, RunSpec(model=spec.model, n_repeats=0, policy=POLICIES["each"]))
    assert all(diff.bitwise for diff in comparison.gradients) and comparison.verdict == "state moved"
    read = comparison.late_reads[0]
    assert int(read.in_recompute) > int(read.in_forward)
    assert any(f"reads {read.name} {read.in_recompute}" in cause for cause in comparison.causes)
    fired = {hazard.rule for hazard in hazards(describe(spec.model), POLICIES["each"])}
    assert "reads-late" in fired and ("moved-shared" in fired) == (kind != "root_counts")


def test_a_cache_that_the_first_step_fills_is_equal() -> None:
    spec = RunSpec(model=reading_nets.ref("lazy_table"), n_repeats=0)
    comparison: Any = compare(spec, RunSpec(model=spec.model, n_repeats=0, policy=POLICIES["each"]))
    assert comparison.verdict == "bitwise equal" and not comparison.late_reads
