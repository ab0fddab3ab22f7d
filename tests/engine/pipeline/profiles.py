"""Price lists of two nets, for those who read them and those who hold forecasts from them against runs."""

from __future__ import annotations

from explorer.engine.pipeline.profile import profile_blocks
from explorer.record.pipeline_cost import PipelineProfile
from tests.engine.pipeline.pipeline_nets import CARRYING, LANGUAGE
from tests.engine.pipeline.plans import spec

NETS = {"language": LANGUAGE, "carrying": CARRYING}
WIDE = {"width": 64, "length": 32}


def profiled(net: str) -> PipelineProfile:
    """For the four microbatches of these plans."""
    groups = tuple((fqn,) for fqn in NETS[net])
    return profile_blocks(spec(net, NETS[net], 2, arguments=WIDE), groups, n_microbatches=4)
