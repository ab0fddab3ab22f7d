"""A step without data holds what an H200 under torch 2.11 held, to the byte (`tests/golden/h200`)."""

from __future__ import annotations

import gzip
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from explorer.engine.bench.measure import measure_without_data
from explorer.engine.model.describe import describe
from explorer.plan.card.caching_allocator import CachingAllocator
from explorer.plan.card.cards import CARDS
from explorer.plan.card.step_on_card import _Play, program_of
from explorer.plan.card.torch_rules import lt_workspace_bytes, workspace_bytes
from explorer.plan.policy.presets import preset
from explorer.record import ModelRef, RunSpec

GOLDEN = Path(__file__).parents[2] / "golden" / "h200"
CARD = replace(CARDS["h200"], torch="2.11")


def lines(name: str) -> dict[str, Any]:
    rows = map(json.loads, gzip.decompress((GOLDEN / name).read_bytes()).splitlines())
    return {row["name"]: row["steps"] for row in rows if "steps" in row and row.get("setting", "default") == "default"}


STEPS = lines("steps.jsonl.gz")
QUICK = [*product(("mlp", "gpt", "vit"), ("keep-all", "every-2"), ("none", "bfloat16"))]


def test_the_first_products_take_the_workspaces_of_the_rules() -> None:
    first = lines("operators.jsonl.gz")
    left = [first[name][0]["left"] for name in ("product", "product with bias")]
    assert [workspace_bytes(CARD), lt_workspace_bytes(CARD)] == left


@pytest.mark.parametrize("case", QUICK, ids=" ".join)
def test_the_allocated_peak_of_a_step_is_met(case: tuple[str, str, Any]) -> None:
    """The row is the peak above what was allocated before the step, in a loop that drops the output."""
    sample, policy, autocast = case
    ref = ModelRef(target=f"sample_models/{sample}.py", size="small")
    graph = describe(ref)
    spec = RunSpec(model=ref, policy=preset(policy, graph), card=CARD, autocast=autocast, holds_output=False)
    play = _Play(program_of(measure_without_data(spec)), CachingAllocator(CARD.total_bytes), CARD)
    play.opening()
    for _ in range(3):
        before = play.allocator.allocated_bytes
        play.run()
    assert play.allocated - before == STEPS[f"{sample} small {policy} {autocast} {spec.optimizer}"][-1]["allocated"]
