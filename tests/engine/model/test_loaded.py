"""A model and a batch: called by the form of the batch, judged by one number, and blamed in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.model.load import load
from explorer.engine.model.loaded import Loaded, blaming, call, default_loss, place
from explorer.errors import ModelFailed
from explorer.record.graph import ModelRef


def test_a_batch_that_does_not_fit_is_shown() -> None:
    with (
        pytest.raises(ModelFailed, match=r"forward of x raised RuntimeError: .*float32\[2, 3\]"),
        blaming(ModelRef(target="x"), torch.randn(2, 3), "forward"),
    ):
        nn.Linear(4, 4)(torch.randn(2, 3))


class Transformed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(3, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "grad":
            return self.fc(x) * torch.func.grad(lambda y: self.fc(y).sum())(x)
        return torch.vmap(lambda y: self.fc(y) if y.sum() > 0 else y)(x)


@pytest.mark.parametrize(("kind", "words"), [("grad", "beside saved-tensor hooks"), ("vmap", "inside torch.vmap")])
def test_a_transform_that_torch_refuses_is_no_fault_of_the_batch(kind: str, words: str) -> None:
    batch = torch.ones(2, 3)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with pytest.raises(ModelFailed) as caught, blaming(ModelRef("net"), batch, "forward"), hooks:
        call(Transformed(kind), batch)
    assert words in caught.value.hint


def test_inputs_by_their_form() -> None:
    class Adds(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + 2 * b

    one, two = torch.ones(1), torch.full((1,), 2.0)
    assert call(Adds(), (one, two)) == call(Adds(), [one, two]) == call(Adds(), {"b": two, "a": one}) == 5


def test_a_loss_is_one_number() -> None:
    loaded = Loaded(ModelRef(target="net.py"), nn.Linear(4, 4), torch.randn(2, 4), torch.randn(2, 4), torch.sub)
    with pytest.raises(ModelFailed, match=r"returned float32\[2, 4\], not a tensor with one number"):
        loaded.loss(loaded.output())
    with pytest.raises(ModelFailed, match="returned float, not a tensor with one number"):
        replace(loaded, loss_function=lambda output, targets: 1.0).loss(loaded.output())


def test_default_losses() -> None:
    x = torch.tensor([3.0, 4.0])
    assert default_loss(x) == 12.5
    assert default_loss({"loss": x.sum(), "logits": x}) == 7
    assert default_loss({"a": x, "ids": torch.tensor([1]), "b": [x]}) == 12.5
    with pytest.raises(ModelFailed, match="nothing to take a loss of"):
        default_loss(torch.tensor([1]))


def test_place_moves_floats_and_leaves_whole_numbers() -> None:
    loaded = load(ModelRef(target="sample_models/tied_lm.py", arguments={"batch": 2, "n_layers": 1, "length": 4}))
    placed = place(loaded, "cpu", torch.float64)
    assert {p.dtype for p in placed.model.parameters()} == {torch.float64}
    assert placed.inputs.dtype == placed.targets.dtype == torch.int64
    assert placed.loss(placed.output()).dtype == torch.float64


class Said(nn.Module):
    def forward(self, *args: object, **kwargs: object) -> tuple[object, object]:
        return args, kwargs


@pytest.mark.parametrize(("inputs", "args", "kwargs"), [
    (1, (1,), {}),
    ((1, 2), (1, 2), {}),
    ([1, {"x": 2}], (1, {"x": 2}), {}),
    (({"x": 1},), ({"x": 1},), {}),
    ({"x": 1, "y": 2}, (), {"x": 1, "y": 2}),
    ({"*": (1, 2), "x": 3}, (1, 2), {"x": 3}),
    ({"x": 3, "*": 1}, (1,), {"x": 3}),
    ({"*": ({"x": 1},)}, ({"x": 1},), {}),
])  # fmt: skip
def test_the_forms_of_inputs(inputs: object, args: object, kwargs: object) -> None:
    assert call(Said(), inputs) == (args, kwargs)


def test_a_dict_that_was_meant_as_one_argument_is_told_how() -> None:
    ref = ModelRef(target="net.py")
    with pytest.raises(ModelFailed, match=r"gets it as \(dict,\)"), blaming(ref, {"x": torch.ones(1)}, "forward"):
        call(nn.Linear(1, 1), {"x": torch.ones(1)})
    with pytest.raises(ModelFailed) as failed, blaming(ref, torch.ones(1), "forward"):
        call(nn.Linear(2, 1), torch.ones(1))
    assert "dict" not in failed.value.hint


def test_a_dict_of_losses_is_their_sum() -> None:
    losses = {"loss_box": torch.tensor(2.0), "loss_class": torch.tensor([3.0])}
    assert default_loss(losses) == 5
    assert default_loss({**losses, "scores": torch.tensor([3.0])}) != 5
