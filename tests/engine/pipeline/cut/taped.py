"""A net and the tape of its forward."""

from __future__ import annotations

import copy

from explorer.engine.model.load import load
from explorer.engine.pipeline.cut.tape import record
from explorer.record.graph import ModelRef
from tests.engine.pipeline.plans import NETS


def taped(net: str, chain: tuple[str, ...]):  # noqa: ANN201
    loaded = load(ModelRef(target=f"{NETS}:{net}"))
    return loaded, record(copy.deepcopy(loaded.model), loaded.inputs, chain)
