"""Counters on classes go back to where they stood before any run; a container that is changed in place does not."""

from __future__ import annotations

from typing import Any

from torch import nn

from explorer.engine.state.snapshot import SharedSnapshot


class Counts(nn.Module):
    n_calls = 0
    scale = 0.5
    seen: Any = [1]

    def forward(self) -> None:
        Counts.n_calls += 1
        Counts.seen.append(2)


def test_plain_values_of_a_class_are_put_back() -> None:
    model = nn.Sequential(Counts())
    start = SharedSnapshot(model)
    for _ in range(2):
        model[0]()
        model[0]()
        assert Counts.n_calls == 2
        start.restore()
        assert (Counts.n_calls, Counts.scale) == (0, 0.5)
    assert Counts.seen == [1, 2, 2, 2, 2]
