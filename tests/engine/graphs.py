"""The block graph of a model that a test has in hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from explorer.engine.model.describe import describe_loaded
from explorer.engine.model.loaded import Loaded, copied
from explorer.record.graph import ModelGraph, ModelRef


def graph_of_loaded(loaded: Loaded) -> ModelGraph:
    """As `describe` sees it; copies are watched."""

    def another() -> Loaded:
        return replace(loaded, model=copied(loaded.model))

    return describe_loaded(another(), another, "cpu")


def graph_of(model: nn.Module, inputs: Any) -> ModelGraph:
    """The same from a net and its `inputs`, as loaded.call takes them."""
    return graph_of_loaded(Loaded(ModelRef(target="<in memory>"), model, inputs, None, None))
