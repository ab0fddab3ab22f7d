"""Blocks with traits, graphs of them, and what to ask of them."""

from __future__ import annotations

from explorer.record.graph import Block, ModelGraph, ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec

MODEL = ModelRef(target="net.py")


def block(fqn: str, *traits: str, **said: object) -> Block:
    about = {"kind": "Block", "n_calls": 1, "parameter_bytes": 4, "buffer_bytes": 0, "output_bytes": 4,
             "saved_bytes": 4, "forward_flops": 1, "rerun_flops": 1, **said}  # fmt: skip
    return Block(fqn=fqn, traits=traits, **about)  # type: ignore[arg-type]


def graph(*blocks: Block, **said: object) -> ModelGraph:
    root = block("", *{trait for each in blocks for trait in each.traits})
    return ModelGraph(model=MODEL, blocks=(root, *blocks), edges=(), **said)  # type: ignore[arg-type]


def rules(found: object) -> list[str]:
    return [hazard.rule for hazard in found]  # type: ignore[attr-defined]


def spec(**said: object) -> RunSpec:
    return RunSpec(model=MODEL, **said)  # type: ignore[arg-type]


A = Policy.recompute(["a"])


OPTIONS = {
    "redraw": Policy.recompute(["a"], preserve_rng_state=False),
    "twice": Policy.recompute(["a"], running_stats="every_forward"),
    "reentrant": Policy.recompute(["a"], use_reentrant=True),
    "unchecked": Policy.recompute(["a"], determinism_check="none"),
}
