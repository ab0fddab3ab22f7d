"""The lock of a training step: the same bytes on every run, and faults of a model's source found and named.

A sample of faults; `python -m benchmarks guard` plays all of them and repeats each lock a hundred times.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from explorer.cli.verbs.lock import in_one_line, markdown_of
from explorer.errors import UnreadableFile
from explorer.own_loop.guard import predicted_lock
from explorer.plan.guard.lock import dumps, load, loads
from explorer.plan.guard.moves import moves, versions
from explorer.record.files import Lock, LockedBlock
from explorer.record.graph import ModelRef
from explorer.record.run import Ranks, RunSpec
from tests.plan.guard.faulty_net import FAULTS

NET = "tests/plan/guard/faulty_net.py"


def predicted(fault: str = "", policy: str = "keep-all") -> Lock:
    return predicted_lock(RunSpec(model=ModelRef(target=NET, arguments={"fault": fault} if fault else {})), policy)


lock_with = cache(predicted)
"""Locks that tests share."""


def clean() -> Lock:
    return lock_with()


@pytest.mark.parametrize("fault", ["softmax in float32", "checkpoint lost"])
def test_a_fault_of_the_source_is_named_first(fault: str) -> None:
    kind, block = FAULTS[fault]
    found = moves(clean(), replace(lock_with(fault), run=clean().run))
    assert found[0].kind == kind
    assert block in (found[0].blocks or [""])


def test_the_sentences_are_those_that_a_reviewer_reads() -> None:
    found = moves(clean(), replace(lock_with("softmax in float32"), run=clean().run))
    cause, total = in_one_line(found).split("; ")
    assert cause.startswith("blocks.1 has other results: softmax (float32) none → 512 B kept, softmax (bfloat16) 256 B")
    assert cause.endswith(": +512 B") and total == "Peak +0.6 %: 84.5 KiB → 85.0 KiB in backward"
    assert "| `blocks.1` | 5.9 KiB | 5.4 KiB | 0 | 0 |" in markdown_of(clean(), lock_with("softmax in float32"), found)


@pytest.mark.parametrize(("n_blocks", "n_more"), [(30, 0), (31, 1), (45, 15)])
def test_the_table_of_a_pull_request_has_thirty_blocks_and_counts_the_others(n_blocks: int, n_more: int) -> None:
    step, old, new = clean(), *({f"{i}": LockedBlock(saved_bytes=size) for i in range(n_blocks)} for size in (1, 2))
    text = markdown_of(replace(step, blocks=old), replace(step, blocks=new), moves(clean(), lock_with("wider batch")))
    lines = text.splitlines()
    assert sum(line.startswith("| `") for line in lines) == n_blocks - n_more
    assert [line for line in lines if "more blocks" in line] == [f"| {n_more} more blocks | | | | |"] * (n_more > 0)


def test_a_cause_comes_before_its_consequences() -> None:
    found = moves(clean(), replace(lock_with("norm in float32"), run=clean().run))
    assert found[0].kind == "dtype" and found[1].blocks == ("blocks.1.norm",)
    wider = moves(clean(), replace(lock_with("wider batch"), run=clean().run))
    assert {move.kind for move in wider[1:]} == {"totals"} and wider[0].kind == "inputs"


def test_equal_blocks_share_a_sentence() -> None:
    recomputed = lock_with(policy="all")
    found = moves(clean(), replace(recomputed, policy=clean().policy))
    assert [move.kind for move in found if move.kind != "totals"] == ["checkpoint added"]
    assert found[0].blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert "(3 blocks) is recomputed now" in found[0].sentence
    assert moves(clean(), recomputed)[0].kind == "conditions"


def test_the_text_has_the_same_bytes_and_comes_back_whole() -> None:
    text = dumps(clean())
    assert dumps(predicted()) == text
    assert loads(text) == clean()
    alone = {name: block for name, block in clean().blocks.items() if not name.startswith("blocks.1")}
    twins = {name.replace("blocks.0", "blocks.1"): block for name, block in alone.items() if "blocks.0" in name}
    equal = replace(clean(), blocks=alone | twins)
    assert '"blocks.1": {"same_as": "blocks.0"}' in dumps(equal) and '"blocks.1.up"' not in dumps(equal)
    assert loads(dumps(equal)) == equal


def test_blocks_of_a_sequential_are_named_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "chain.py").write_text(CHAIN)
    spec = RunSpec(model=ModelRef(target=f"{tmp_path}/chain.py:build"))
    found = moves(*(predicted_lock(spec, policy) for policy in ("keep-all", "all")))
    assert [move.blocks for move in found if move.kind == "checkpoint added"] == [("0.0", "0.1")]


def test_versions_are_a_remark(tmp_path: Path) -> None:
    older = replace(clean(), packages={"explorer": "0.1.0", "torch": "2.12.0"})
    assert not moves(older, clean())
    assert "torch 2.12.0 → 2.13.0" in versions(older, replace(clean(), packages=older.packages | {"torch": "2.13.0"}))
    (tmp_path / "a.lock").write_text("{}")
    with pytest.raises(UnreadableFile, match="a.lock.*packages"):
        load(tmp_path / "a.lock")


CHAIN = """
from torch import nn, ones


def build():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2)))
    return nn.Sequential(layers, nn.Linear(6, 1)), ones(2, 6)
"""
SHARDED = """
from torch import nn, ones
from torch.distributed.fsdp import fully_shard


def build():
    layers = (nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(2))
    return nn.Sequential(*layers), ones(2, 6)


def shard(model, mesh):
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
"""


def test_resharding_that_was_switched_on_is_told_in_gathers(tmp_path: Path) -> None:
    """The file that splits the model moved, its options did not."""
    path = tmp_path / "sharded.py"
    ranks = Ranks(n_ranks=2, data="none", parallelize=f"{path}:shard")
    texts = []
    for source in (SHARDED, SHARDED, SHARDED.replace(", reshard_after_forward=False", "")):
        path.write_text(source)
        texts.append(dumps(predicted_lock(RunSpec(model=ModelRef(target=f"{path}:build"), ranks=ranks), "keep-all")))
    assert texts[0] == texts[1] and loads(texts[0]).step.rank == 0
    found = [move.sentence for move in moves(loads(texts[0]), loads(texts[2]))]
    assert found[0] == "Each of 0, 1 (2 blocks) has 1 all-gather in backward, had 0: +672 B in all."
    assert found[-1] == "all-gather: 2 times, 672 B in all became 4 times, 1.3 KiB in all."
    assert "collectives" not in dumps(clean()), "a lock of one process is as before"
