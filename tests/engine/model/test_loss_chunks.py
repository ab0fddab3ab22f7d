"""The loss over chunks of the batch: the same loss and gradients, by the lever and by its line for a script."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from explorer.engine.model.loaded import Loaded
from explorer.engine.model.loss_chunks import in_chunks, logits_of
from explorer.plan import lever_text
from explorer.record.fit import LeverRow, PlayedStep
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec


class Net(nn.Module):
    def __init__(self, end: Callable[[Tensor], object] = lambda logits: logits) -> None:
        super().__init__()
        self.body, self.head, self.end = nn.Linear(6, 8), nn.Linear(8, 50), end

    def forward(self, x: Tensor) -> object:
        logits = self.head(self.body(x).relu())
        return self.end(logits)


def loaded_of(model: nn.Module, loss: object = F.cross_entropy) -> Loaded:
    batch = torch.randn(11, 6), torch.randint(50, (11,))
    return Loaded(ModelRef(target="nets.py"), model, *batch, loss)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss_function", [F.cross_entropy, None], ids=["cross entropy", "default loss"])
def test_chunks_of_unequal_length_have_the_loss_and_the_gradients_of_the_whole(loss_function: object) -> None:
    whole = loaded_of(Net(), loss_function)
    model = copy.deepcopy(whole.model)
    chunked = in_chunks(Loaded(whole.ref, model, whole.inputs, whole.targets, loss_function), "head")  # type: ignore[arg-type]
    losses = [each.loss(each.output()) for each in (whole, chunked)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(whole.model.parameters(), model.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_line_for_a_script_is_the_loss_of_the_lever() -> None:
    loaded = loaded_of(Net())
    spec = RunSpec(model=loaded.ref, chunked_layer="head")
    lines = lever_text.script_lines(LeverRow(levers=("chunks",), step=PlayedStep(spec=spec, step_peak_bytes=1)))
    names = {"checkpoint": checkpoint, "loss_function": F.cross_entropy}
    names |= {"model": loaded.model, "targets": loaded.targets}
    names["hidden"] = loaded.model.body(loaded.inputs).relu()
    exec("\n".join(lines), names)
    assert "hidden" not in names, "the script would hold it through backward"
    names["loss"].backward()  # type: ignore[attr-defined]
    chunked = in_chunks(loaded, "head")
    assert torch.equal(names["loss"], chunked.loss(chunked.output()))  # type: ignore[arg-type]


def test_the_line_that_makes_the_logits_is_named_or_why_they_cannot_be_made_in_chunks() -> None:
    fqn, where = logits_of(loaded_of(Net()))
    assert fqn == "head" and where.startswith("test_loss_chunks.py:")
    line = Path(__file__).read_text().splitlines()[int(where.partition(":")[2]) - 1]
    assert "self.head(" in line
    for end in (lambda logits: logits.softmax(-1), lambda logits: {"logits": logits}, lambda logits: logits.mean()):
        fqn, reason = logits_of(loaded_of(Net(end)))
        assert not fqn and f"computes with the output of head, made in {where}" in reason
    unused = Net()
    unused.unused = nn.Linear(2, 2)
    for model in (unused, nn.Linear(6, 50)):
        fqn, reason = logits_of(loaded_of(model))
        assert not fqn and "is not called once with one tensor" in reason
