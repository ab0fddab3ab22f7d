"""Blocks with traits, graphs of them, and what to ask of them."""

from __future__ import annotations

from explorer.record.graph import Block, ModelGraph, ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec

MODEL = ModelRef(target="net.py")


def block(fqn: str, *traits: str, **fields: object) -> Block:
    about = {"kind": "Block", "n_calls": 1, "parameter_bytes": 4, "buffer_bytes": 0, "output_bytes": 4,
             "saved_bytes": 4, "forward_flops": 1, "rerun_flops": 1, **fields}  # fmt: skip
    return Block(fqn=fqn, traits=traits, **about)  # type: ignore[arg-type]


def graph(*blocks: Block, **fields: object) -> ModelGraph:
    root = block("", *{trait for each in blocks for trait in each.traits})
    return ModelGraph(model=MODEL, blocks=(root, *blocks), edges=(), **fields)  # type: ignore[arg-type]


def rules(hazards: object) -> list[str]:
    return [hazard.rule for hazard in hazards]  # type: ignore[attr-defined]


def spec(**fields: object) -> RunSpec:
    return RunSpec(model=MODEL, **fields)  # type: ignore[arg-type]


A = Policy.recompute(["a"])


OPTIONS = {
    "redraw": Policy.recompute(["a"], preserve_rng_state=False),
    "twice": Policy.recompute(["a"], running_stats="every_forward"),
    "reentrant": Policy.recompute(["a"], use_reentrant=True),
    "unchecked": Policy.recompute(["a"], determinism_check="none"),
}
