"""The block graph of a net that a test has made."""

from __future__ import annotations

from typing import Any

from torch import nn

from explorer.engine.model.describe import describe_loaded
from explorer.engine.model.loaded import Loaded
from explorer.record.graph import ModelGraph, ModelRef


def graph_of(model: nn.Module, inputs: Any) -> ModelGraph:
    """As `describe` sees it; `inputs` as loaded.call takes them."""
    return describe_loaded(Loaded(ModelRef(target="<in memory>"), model, inputs, None, None))
