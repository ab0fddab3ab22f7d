"""A hook reports for one module; what is copied or unpickled keeps silent."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from explorer.engine.watch.here_only import HereOnly


def test_copies_report_nothing() -> None:
    heard: list[str] = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(HereOnly(lambda name, *rest: heard.append(name), "before"), with_kwargs=True)
    model.register_forward_hook(HereOnly(lambda name, *rest: heard.append(name), "after"), always_call=True)
    model(torch.ones(1, 2))
    assert heard == ["before", "after"]
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(torch.ones(1, 2)), model.forward(torch.ones(1, 2)))
    assert heard == ["before", "after"]
