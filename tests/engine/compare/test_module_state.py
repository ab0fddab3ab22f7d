"""The audit sees what a module remembers, in copies that no later change can reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from explorer.engine.compare.module_state import StateAudit


class Holder(nn.Module):
    held: Any

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held
        self.register_buffer("table", torch.zeros(3))


class Plain:
    def __init__(self) -> None:
        self.n = 0


def changed(before: Any, mutate: Any) -> list[tuple[str, str, str]]:
    model = nn.Sequential(Holder(before))
    audit = StateAudit(model)
    audit.on_phase("forward")
    audit.on_phase("backward")
    mutate(model[0])
    audit.on_phase("optimizer")
    # This file holds the values too, in the marks of its test functions.
    return [(change.block, change.name, change.kind) for change in audit.changes.values() if change.block]


def set_to(value: Any) -> Any:
    return lambda holder: setattr(holder, "held", value)


HELD = [("0", "held", "attribute")]


@pytest.mark.parametrize(("before", "mutate"), [
    (1, set_to(2)),
    (1, set_to(1.0)),
    (None, set_to(3)),
    ([1], lambda holder: holder.held.append(2)),
    ({"a": [1]}, lambda holder: holder.held["a"].append(2)),
    (torch.zeros(2), lambda holder: holder.held.add_(1)),
    ([torch.zeros(2)], lambda holder: holder.held[0].add_(1)),
    ({1, 2}, lambda holder: holder.held.add(3)),
    (Plain(), lambda holder: setattr(holder.held, "n", 1)),
    (1, lambda holder: delattr(holder, "held")),
], ids=["number", "type", "none", "list", "dict", "tensor", "tensor in list", "set", "object", "gone"])  # fmt: skip
def test_a_change_is_seen(before: Any, mutate: Any) -> None:
    assert changed(before, mutate) == HELD


@pytest.mark.parametrize(
    "before",
    [1, float("nan"), "text", [1, {"a": torch.ones(2)}], (1, 2), Plain(), len, None],
    ids=["number", "nan", "text", "list", "tuple", "object", "function", "none"],
)
def test_no_change_is_seen_where_there_is_none(before: Any) -> None:
    assert changed(before, lambda holder: None) == []


def test_an_equal_tensor_made_anew_is_no_change() -> None:
    """A loss kept on the module is computed again with the same bits: nobody is harmed."""
    assert changed(torch.ones(2), set_to(torch.ones(2))) == []


def test_buffers_are_told_from_attributes() -> None:
    assert changed(0, lambda holder: holder.table.add_(1)) == [("0", "table", "buffer")]


def test_torch_s_own_fields_and_generators_do_not_count() -> None:
    def mutate(holder: Holder) -> None:
        holder.eval()
        holder.register_forward_hook(lambda *_: None)
        holder.held.manual_seed(5)

    assert changed(torch.Generator(), mutate) == []


def test_only_backward_is_judged() -> None:
    model = nn.Sequential(Holder(0))
    audit = StateAudit(model)
    for phase, value in [("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2), ("optimizer", 3)]:
        audit.on_phase(phase)
        if phase != "backward":
            model[0].held = value
    assert audit.changes == {}


def test_accumulation_reports_a_change_once() -> None:
    model = nn.Sequential(Holder(0))
    audit = StateAudit(model)
    for _ in range(3):
        audit.on_phase("forward")
        audit.on_phase("backward")
        model[0].held += 1
    audit.close()
    (change,) = audit.changes.values()
    assert (change.after_forward, change.after_backward) == ("0", "1")
