"""A forward whose every operator is looked at is a step like any other, and the look ends where backward begins."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.engine.bench import timing
from explorer.engine.bench.step import prepare
from explorer.engine.bench.timing import dispatched_forward_ms
from explorer.engine.device.device import CpuClock
from explorer.record import ModelRef, RunSpec


class Look(TorchDispatchMode):
    """In place of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_it_looks_at_every_forward_and_at_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Look] = []

    def contexts(ops: list[Any]) -> tuple[Look, None]:
        assert ops == [], "nothing is kept"
        looks.append(Look())
        return looks[-1], None

    trainee = prepare(RunSpec(model=ModelRef(target="sample_models/mlp.py"), n_accumulation=2))
    assert dispatched_forward_ms(trainee, CpuClock()) > 0, "torch's own"
    monkeypatch.setattr(timing, "create_selective_checkpoint_contexts", contexts)
    dispatched_forward_ms(trainee, CpuClock())
    first, second = (look.seen for look in looks)
    assert first == second and "aten.addmm.default" in first, "one a microbatch"
    assert not [op for op in first if "backward" in op]
