"""How a block is handed what it is given, and whether that has changed once it has run."""

from __future__ import annotations

from torch import Tensor, nn

from tests.engine.walk_net import W, Walk, graph, having


def test_writing_into_an_input_is_told_of_the_one_who_was_given_it() -> None:
    inner = nn.Sequential(nn.Linear(W, W), nn.ReLU(inplace=True))
    assert having(graph(nn.Sequential(inner, nn.Linear(W, W))), "changes_inputs") == ["0.1"]


class Speaks(nn.Module):
    """Takes its tensor by name and answers in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, *, hidden: Tensor, cache: object = None) -> dict[str, Tensor]:
        return {"hidden": self.linear(hidden)}


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.speaks = Speaks()

    def forward(self, x: Tensor) -> Tensor:
        return self.speaks(hidden=x * 1.0, cache=[])["hidden"]


def test_ways_of_calling_that_checkpointing_cares_for() -> None:
    described = graph(Asks())
    assert having(described, "keyword_inputs") == having(described, "nested_outputs") == ["speaks"]
    assert having(described, "keeps_cache") == []  # handed one, and leaves it alone
    assert having(graph(Walk(1)), "inputs_need_no_grad") == ["", "stem"]
