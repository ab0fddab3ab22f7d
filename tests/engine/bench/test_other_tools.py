"""A block's autograd graph by torchviz, and the snapshot for PyTorch's memory viewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from explorer.engine.bench.other_tools import draw_autograd, save_snapshot
from explorer.engine.policy.units import observe_recompute
from explorer.errors import BadInput, NotOnThisDevice
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.engine.tiny_nets import ref

GPT = ModelRef(target="sample_models/gpt.py", arguments={"n_layers": 2, "width": 16, "length": 8, "batch": 2})


def spec(**options: object) -> RunSpec:
    return RunSpec(model=GPT, policy=Policy.recompute((), **options))


def test_non_reentrant_keeps_the_nodes_and_empties_them() -> None:
    drawn = draw_autograd(spec(), "blocks.0")
    assert drawn.block == "blocks.0"
    assert drawn.recomputed.n_nodes == drawn.kept.n_nodes > 30
    assert drawn.recomputed.saved_bytes < drawn.kept.saved_bytes / 5
    assert drawn.recomputed.n_saved_tensors < drawn.kept.n_saved_tensors


def test_reentrant_is_one_node() -> None:
    drawn = draw_autograd(spec(use_reentrant=True), "blocks.0")
    assert "CheckpointFunctionBackward" in drawn.recomputed.dot
    assert "CheckpointFunctionBackward" not in drawn.kept.dot
    assert drawn.recomputed.n_nodes < drawn.kept.n_nodes / 5


def test_the_drawing_names_parameters_and_inputs() -> None:
    drawn = draw_autograd(spec(), "blocks.1.mlp")
    assert drawn.kept.dot.startswith("digraph")
    for name in ("blocks.1.mlp.up.weight", "blocks.1.mlp.down.bias", "input 0"):
        assert name in drawn.kept.dot
        assert name in drawn.recomputed.dot


def test_a_drawing_is_reproducible_but_for_addresses_and_runs_no_backward() -> None:
    reruns: list[str] = []
    with observe_recompute(lambda fqn, starts: reruns.append(fqn)):
        one, two = (draw_autograd(spec(), "blocks.0").kept for _ in range(2))
    assert (one.n_nodes, one.n_saved_tensors, one.saved_bytes) == (two.n_nodes, two.n_saved_tensors, two.saved_bytes)
    assert reruns == []


@pytest.mark.parametrize(("block", "words"), [("block.0", "no block 'block.0'"), ("blocks", "never called")])
def test_what_cannot_be_drawn(block: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        draw_autograd(spec(), block)


def test_a_snapshot_needs_cudas_allocator(tmp_path: Path) -> None:
    with pytest.raises(NotOnThisDevice, match="asked of cpu"):
        save_snapshot(RunSpec(model=ref("chain")), tmp_path / "step.pickle")
    assert not list(tmp_path.iterdir())
