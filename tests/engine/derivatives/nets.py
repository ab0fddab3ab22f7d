"""A spec of one of the trap nets."""

from __future__ import annotations

from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.engine import trap_nets


def spec(net: str, blocks: tuple[str, ...] = ("1", "2"), **arguments: str) -> RunSpec:
    return RunSpec(model=trap_nets.ref(net, **arguments), policy=Policy.recompute(blocks))
